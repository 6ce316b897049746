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
    """Numbers of blocks since the start."""

    num_stored: int = 0  # copied to the host
    num_loaded: int = 0  # copied back
    num_evicted: int = 0  # dropped from the host for others


class HostTier(Extension, BlockListener):
    """A cache of evicted blocks with `num_places` places; the least recently used one is evicted.

    A prefix cache loses the tail of a chain before its head, so the tail is also the first to be
    evicted here.
    """

    def __init__(self, block_manager: BlockManager, num_places: int) -> None:
        self._manager, self._cache = block_manager, block_manager.prefix_cache
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

    @property
    def num_used_places(self) -> int:
        return len(self._places)

    # ------------------------------------------------------------------ out

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        """Keep a block that has been evicted, as long as no step has changed its content."""
        if not is_last:
            return
        key = (self._cache.keep(block_hash), group)
        if key in self._places:
            self._places.move_to_end(key)
        elif (place := self._take_place()) is not None:
            self._places[key] = place
            self._to_host[place] = block
        else:
            self._let_go(key[0])

    def _take_place(self) -> int | None:
        """Return a free place, if need be by evicting another prefix; None if all will be read."""
        if self._free:
            return self._free.pop()
        for key, place in self._places.items():
            if place not in self._read:
                del self._places[key]
                self._to_host.pop(place, None)
                self._let_go(key[0])
                self.stats.num_evicted += 1
                return place
        return None

    def _let_go(self, prefix: Prefix) -> None:
        """Tell the prefix cache that a prefix is not kept here, unless another group keeps it."""
        groups = range(len(self._manager.windows))
        if not any((prefix, group) in self._places for group in groups):
            self._cache.let_go(prefix)

    def on_cleared(self) -> None:
        """Forget everything: a step has failed, the weights have changed, or a user wants it."""
        self._clear()

    # ------------------------------------------------------------------ in

    def on_admit(self, seq: Sequence) -> None:
        """Fill the blocks after the pool's hit from the host."""
        size = self._manager.block_size
        first = seq.num_computed_tokens // size
        most = min(len(seq.token_ids) - 1, seq.num_allocated_tokens) // size
        if not self._places or first >= most or seq.needs_prompt_outputs:
            return
        chain = self._cache.chain(seq, most)
        end = first
        groups = range(len(seq.block_tables))
        while end < len(chain) and all((chain[end], group) in self._places for group in groups):
            end += 1
        # The tail first: it is used less recently than the head.
        for index in reversed(range(first, end)):
            for group, table in enumerate(seq.block_tables):
                key = (chain[index], group)
                self._places.move_to_end(key)
                self._to_device[table[index]] = self._places[key]
                self._read.add(self._places[key])
        seq.num_computed_tokens = end * size

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
