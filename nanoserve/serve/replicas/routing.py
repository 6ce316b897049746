"""Which replica gets a request, by what each is thought to have cached and has left to do."""

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nanoserve.config import EngineConfig
from nanoserve.serve.replicas.messages import Order
from nanoserve.serve.replicas.prefix_router import PrefixRouter


@dataclass
class Member:
    """A replica that can be sent to."""

    number: int  # that it is known by to people: the lowest that was free
    load: int = 0  # tokens of work, of the requests that were sent from here
    num_sequences: int = 0  # of those
    others_load: int = 0  # the same of other ingresses' requests, as the replica has told last
    others_num_sequences: int = 0


class Placement:
    """Members, what is at each of them, and the choice between them.

    What a member has to do is the sum over the requests in flight there, and not a count of what
    came and went: nothing can drift. Threads may share it: Serve's router has one, the fleet has
    another.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._lock = threading.Lock()
        self._max_num_seqs, self._caches = config.max_num_seqs, config.enable_prefix_caching
        self._router = PrefixRouter(config.block_size, config.prefix_cache_seed)
        self.members: dict[str, Member] = {}

    @property
    def backlog(self) -> int:
        """Sequences in flight, less those for whom the replicas have slots; below 0 is room."""
        with self._lock:
            return sum(
                member.num_sequences + member.others_num_sequences - self._max_num_seqs
                for member in self.members.values()
            )

    def hash(self, order: Order) -> None:
        """Note what a cache might have of its prompt."""
        request = order.request
        if self._caches and request.params.prompt_logprobs is None:  # which use no cached prefix
            with self._lock:
                key = request.sequences[0].cache_key  # the salt is in it
                order.hashes = self._router.hashes(request.prompt_token_ids, key)

    def join(self, name: str, num_kv_blocks: int) -> Member:
        with self._lock:
            taken = {member.number for member in self.members.values()}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            self.members[name] = Member(number)
            self._router.add_replica(name, num_kv_blocks)
            return self.members[name]

    def leave(self, name: str) -> None:
        """Idempotent."""
        with self._lock:
            if self.members.pop(name, None) is not None:
                self._router.remove_replica(name)

    def choose(self, order: Order, candidates: Collection[str]) -> str | None:
        """One of `candidates` that is a member; None if there is none at present.

        One that was chosen before, and that Serve cannot reach, is the last choice.
        """
        with self._lock:
            order.unreached.add(order.replica)
            self._release(order)
            loads = {
                name: member.load + member.others_load
                for name in candidates
                if (member := self.members.get(name)) is not None
            }
            if not loads:
                return None
            reached = {name: load for name, load in loads.items() if name not in order.unreached}
            loads = reached or loads
            num_tokens = len(order.request.prompt_token_ids)
            name = self._router.choose(order.hashes, num_tokens, loads)
            order.num_matched = self._router.matches(order.hashes, [name])[name]
            self._router.sent(name, order.hashes)
            order.replica = name
            self.members[name].num_sequences += order.num_sequences
            self._count(order, order.work)
            return name

    def note_tokens(self, order: Order, num_tokens: int) -> None:
        """So many more have come of it."""
        with self._lock:
            order.num_tokens += num_tokens
            self._count(order, order.work)

    def release(self, order: Order) -> None:
        """It is at no replica any more. Idempotent."""
        with self._lock:
            self._release(order)

    def note_others(self, name: str, num_sequences: int, load: int) -> None:
        """What other ingresses have at a replica."""
        with self._lock:
            if name in self.members:
                member = self.members[name]
                member.others_num_sequences, member.others_load = num_sequences, load

    def note_blocks(self, name: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """What a replica has told of its cache."""
        with self._lock:
            if name in self.members:
                self._router.update(name, stored, removed)

    def _release(self, order: Order) -> None:
        member = self.members.get(order.replica)
        if member is not None:
            member.num_sequences -= order.num_sequences
        self._count(order, 0)
        order.replica = None

    def _count(self, order: Order, work: int) -> None:
        member = self.members.get(order.replica)
        if member is not None:
            member.load += work - order.counted
        order.counted = work
