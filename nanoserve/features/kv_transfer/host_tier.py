"""The host tier keeps evicted KV blocks in the host's memory, where later prompts find them.

    evicted block --to_host--> place --to_device--> block of a sequence that was just admitted

The prefix cache's tree names what a block holds, and the tier keeps the prefixes of its places in
that tree. So a hit in the tier is proved like a hit in the pool, by comparing tokens and parents.

All copies of a step are launched before its model, on the same stream, so nothing has to wait: a
block's K and V were written by an earlier step, and are read by this step or a later one.
"""

from collections import OrderedDict
from dataclasses import dataclass

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import ForwardInputs, KVTransfers
from nanoserve.engine.extension import Extension, PreparedFeature
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.listeners import BlockListener
from nanoserve.engine.plan import Plan
from nanoserve.engine.prefix_cache import Prefix
from nanoserve.engine.sequence import Sequence
from nanoserve.utils.checks import require
from nanoserve.worker.kv_cache import kv_block_bytes, num_host_places, physical_memory_bytes

Key = tuple[Prefix, int]  # with the layer group


@dataclass
class TierStats:
    """Totals since the start. Tokens are counted like those of the prefix cache: once a request."""

    num_stored: int = 0  # blocks copied to the host
    num_loaded: int = 0  # blocks copied back
    num_evicted: int = 0  # blocks dropped from the host for others
    queries: int = 0  # prompt tokens that the pool's prefix cache did not have
    hits: int = 0  # those of them that the host had


class HostTier(Extension, BlockListener):
    """A cache of evicted blocks with `num_places` places; the least recently used one is evicted.

    A prefix cache loses the tail of a chain before its head, so the tail is also the first to be
    evicted here.
    """

    def __init__(self, block_manager: BlockManager, num_places: int) -> None:
        self._manager, self._cache = block_manager, block_manager.prefix_cache
        self._groups = range(len(block_manager.windows))
        self.num_places, self.stats = num_places, TierStats()
        self._clear()
        block_manager.listeners.append(self)

    def _clear(self) -> None:
        self._places: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(self.num_places))
        # Copies for the next step. A place that is about to be read must not get another content.
        self._to_host: dict[int, int] = {}  # by place
        self._to_device: dict[int, int] = {}  # by block
        self._read: set[int] = set()
        # Of the sequence that may be admitted next: its prefixes, and their places.
        self._chain: list[Prefix] = []
        self._wanted: set[int] = set()

    @property
    def num_used_places(self) -> int:
        return len(self._places)

    # ------------------------------------------------------------------ out

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        """Keep a block that has been evicted, as long as no step has changed its content."""
        if not is_last:
            return
        prefix = self._cache.keep(block_hash)
        key = prefix, group
        if key in self._places:
            self._places.move_to_end(key)
        elif (place := self._take_place()) is not None:
            self._places[key] = place
            self._to_host[place] = block
            return
        self._cache.let_go(prefix)

    def _take_place(self) -> int | None:
        """Return a free place, if need be by evicting another prefix; None if all are wanted."""
        if self._free:
            return self._free.pop()
        for key, place in self._places.items():
            if place not in self._read and place not in self._wanted:
                del self._places[key]
                self._to_host.pop(place, None)
                self._cache.let_go(key[0])
                self.stats.num_evicted += 1
                return place
        return None

    def check(self) -> None:
        """Raise `RuntimeError` unless places, copies and prefixes agree. O(places)."""
        used = list(self._places.values())
        problems = {
            "places are lost or used twice": sorted([*used, *self._free])
            != list(range(self.num_places)),
            "a copy goes to a free place": not set(used).issuperset(self._to_host),
            "a place to be read is free": not set(used).issuperset(self._read),
            "the places to be read are not those of the copies": self._read
            != set(self._to_device.values()),
            "a prefix has left the tree": any(
                not self._cache.is_known(prefix) for prefix, _ in self._places
            ),
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found:
            raise RuntimeError(f"the host tier is inconsistent: {found}")

    def on_cleared(self) -> None:
        """Forget everything: a step has failed, the weights have changed, or a user wants it."""
        self._clear()

    # ------------------------------------------------------------------ in

    def may_admit(self, seq: Sequence, plan: Plan) -> bool:
        """Keep what the sequence will find here: its new blocks evict others, which come here."""
        self._chain, self._wanted = [], set()
        if self._places and not seq.needs_prompt_outputs:
            most, groups = (len(seq.token_ids) - 1) // self._manager.block_size, self._groups
            self._chain = self._cache.chain(seq, most)
            keys = ((prefix, group) for prefix in self._chain for group in groups)
            self._wanted = {self._places[key] for key in keys if key in self._places}
        return True

    def on_admit(self, seq: Sequence) -> None:
        """Fill the blocks after the pool's hit from the host."""
        size = self._manager.block_size
        first = seq.num_computed_tokens // size
        # One token at least is computed, in blocks that the sequence has already.
        is_first = seq.index == 0 and seq.metrics.num_preemptions == 0
        if is_first:
            self.stats.queries += seq.num_prompt_tokens - seq.num_computed_tokens
        chain = self._chain[: (seq.num_allocated_tokens - 1) // size]
        end = first
        while end < len(chain) and all((chain[end], g) in self._places for g in self._groups):
            end += 1
        # The tail first: it is used less recently than the head.
        for index in reversed(range(first, end)):
            for group, table in enumerate(seq.block_tables):
                key = (chain[index], group)
                self._places.move_to_end(key)
                self._to_device[table[index]] = self._places[key]
                self._read.add(self._places[key])
        seq.num_computed_tokens = end * size
        self._wanted = set()
        if is_first:
            self.stats.hits += (end - first) * size

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        """Keep a sequence that was just admitted within its blocks.

        A group with a window has got blocks for the first tokens after the pool's hit only. More of
        them may be missing, and nothing may be preempted while sequences are admitted.
        """
        if plan.admitted and plan.admitted[-1] is seq:
            return min(num_tokens, seq.num_allocated_tokens - seq.num_computed_tokens)
        return num_tokens

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Hand over the copies to the step."""
        if not self._to_host and not self._to_device:
            return
        to_host = [(block, place) for place, block in self._to_host.items()]
        to_device = [(place, block) for block, place in self._to_device.items()]
        inputs.kv_transfers = KVTransfers(to_host, to_device)
        self.stats.num_stored += len(to_host)
        self.stats.num_loaded += len(to_device)
        self._to_host, self._to_device, self._read = {}, {}, set()


def prepare_host_tier(config: EngineConfig, model_config: ModelConfig) -> PreparedFeature:
    """Return a feature that adds a `HostTier` with `kv_offloading_size` GiB to an engine.

    Raises `ValueError` for a size that holds no block, or that this machine does not have.
    """
    size, num_places = config.kv_offloading_size, num_host_places(config, model_config)
    block_bytes = kv_block_bytes(config, model_config)
    require(
        num_places > 0,
        f"kv_offloading_size={size} GiB holds no KV block, which takes {block_bytes} bytes",
    )
    available = physical_memory_bytes()
    require(
        num_places * block_bytes <= available,
        f"kv_offloading_size={size} GiB is more than this machine's memory, {available} bytes",
    )

    def add_to(engine: GuardedEngine) -> None:
        engine.add_extension(HostTier(engine.scheduler.block_manager, num_places))

    return PreparedFeature(add_to)
