"""Place requests on replicas by their expected cache hits and their load."""

import random
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nanoserve.config import EngineConfig
from nanoserve.serve.replicas.messages import Order
from nanoserve.serve.replicas.prefix_router import PrefixRouter


@dataclass
class Member:
    """A replica that accepts requests."""

    number: int  # shown to users: the lowest free number when it joined
    load: int = 0  # expected tokens still to compute, for the requests of this ingress
    num_sequences: int = 0  # sequences in flight, for the requests of this ingress
    others_load: int = 0  # the load of other ingresses' requests, as last reported by the replica
    others_num_sequences: int = 0


class Placement:
    """The members with their loads, and the choice between them.

    The load of a member is a sum over the requests in flight there, so that it cannot drift.
    Thread-safe, because both the thread of Serve's router and the thread of the fleet use it.
    """

    def __init__(self, config: EngineConfig, rng: random.Random | None = None) -> None:
        """Start without members. `rng` breaks ties between them; None: a random one."""
        self._lock = threading.Lock()
        self._max_num_seqs, self._caches = config.max_num_seqs, config.enable_prefix_caching
        self._router = PrefixRouter(config.block_size, config.prefix_cache_seed, rng=rng)
        self.members: dict[str, Member] = {}

    @property
    def backlog(self) -> int:
        """Number of sequences in flight minus slots of all replicas; negative if slots are free."""
        with self._lock:
            return sum(
                member.num_sequences + member.others_num_sequences - self._max_num_seqs
                for member in self.members.values()
            )

    def hash(self, order: Order) -> None:
        """Compute the block hashes of a prompt, if it can have cache hits."""
        request = order.request
        if self._caches and request.params.prompt_logprobs is None:  # they disable cache hits
            with self._lock:
                seq = request.sequences[0]
                own = seq.cache_key, seq.prompt_embeds  # the key includes the salt
                order.hashes = self._router.hashes(request.prompt_token_ids, *own)

    def join(self, name: str, num_kv_blocks: int) -> Member:
        with self._lock:
            taken = {member.number for member in self.members.values()}
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            self.members[name] = Member(number)
            self._router.add_replica(name, num_kv_blocks)
            return self.members[name]

    def leave(self, name: str) -> None:
        """Remove a member. Idempotent."""
        with self._lock:
            if self.members.pop(name, None) is not None:
                self._router.remove_replica(name)

    def choose(self, order: Order, candidates: Collection[str]) -> str | None:
        """Return the best of `candidates` that is a member; None if there is none at present.

        A replica that was chosen for this request before but could not be reached by Serve is
        chosen only if there is no other.
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
        """Add the number of new output tokens of a request."""
        with self._lock:
            order.num_tokens += num_tokens
            self._count(order, order.work)

    def release(self, order: Order) -> None:
        """Remove a request from the load of its replica. Idempotent."""
        with self._lock:
            self._release(order)

    def note_others(self, name: str, num_sequences: int, load: int) -> None:
        """Set the load of other ingresses at a replica."""
        with self._lock:
            if name in self.members:
                member = self.members[name]
                member.others_num_sequences, member.others_load = num_sequences, load

    def note_blocks(self, name: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Apply the cache and evict events of a replica."""
        with self._lock:
            if name in self.members:
                self._router.update(name, stored, removed)

    def _release(self, order: Order) -> None:
        member = self.members.get(order.replica or "")
        if member is not None:
            member.num_sequences -= order.num_sequences
        self._count(order, 0)
        order.replica = None

    def _count(self, order: Order, work: int) -> None:
        member = self.members.get(order.replica or "")
        if member is not None:
            member.load += work - order.counted
        order.counted = work
