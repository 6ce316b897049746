"""Stores the KV blocks of an engine in a connector.

Every full block is stored once, when its K and V have been computed: a step copies it to a staging
place, and when that step has ended, a thread gives it to the connector.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.listeners import BlockListener, CachedBlock
from nanoserve.engine.plan import Plan
from nanoserve.engine.prefix_cache import Prefix
from nanoserve.features.kv_transfer.block_keys import BlockKeys
from nanoserve.features.kv_transfer.calls import ConnectorCalls
from nanoserve.features.kv_transfer.connector import BlockKey
from nanoserve.features.kv_transfer.staging import Staging


class Launched(NamedTuple):
    """A step in flight that copies blocks with these keys to these places."""

    plan: Plan
    keys: list[BlockKey]
    places: list[int]


class ConnectorStores(Extension, BlockListener):
    """Gives a connector what the engine computes. It comes after `ConnectorLoads`."""

    def __init__(
        self,
        block_manager: BlockManager,
        calls: ConnectorCalls,
        keys: BlockKeys,
        staging: Staging,
        is_enabled: Callable[[], bool],
    ) -> None:
        self._cache = block_manager.prefix_cache
        self._calls, self.stats, self._keys = calls, calls.stats, keys
        self._staging, self._is_enabled = staging, is_enabled
        self._thread = ThreadPoolExecutor(1, "nanoserve-kv-store")  # one: parents come first
        # Blocks to be stored, with their prefixes and groups: those that were cached since the last
        # step was launched, those that were cached before that, and those that have been evicted.
        self._new: dict[int, tuple[Prefix, int]] = {}
        self._ready: dict[int, tuple[Prefix, int]] = {}
        self._leaving: dict[int, tuple[Prefix, int]] = {}
        self._launched: deque[Launched] = deque()
        self._stores: list[tuple[Future[None], list[int]]] = []
        block_manager.listeners.append(self)

    def on_cached(self, cached: CachedBlock) -> None:
        """Note a block to be stored; its K and V are complete after the step at hand."""
        if not cached.is_copy and self._is_enabled():
            self._new[cached.block] = self._cache.keep(cached.block_hash), cached.group

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        """Note that a block is stored by the next step or never: it gets another content."""
        for waiting in (self._ready, self._new):
            if block in waiting:
                self._leaving[block] = waiting.pop(block)

    def on_step_start(self) -> None:
        """Free the places whose blocks have been stored."""
        for each in [each for each in self._stores if each[0].done()]:
            self._stores.remove(each)
            self._staging.give_back(each[1])

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Add the copies from blocks to staging places."""
        copies: list[tuple[int, int]] = []
        keys: list[BlockKey] = []
        leaving, self._leaving = self._leaving, {}
        # A chain is evicted from its tail, and stored from its head.
        for block, entry in reversed(leaving.items()):
            if self._has_room:
                self._copy_out(block, entry, copies, keys)
            else:
                self.stats.num_not_stored += 1
            self._cache.let_go(entry[0])
        while self._ready and self._has_room:
            block = next(iter(self._ready))
            self._copy_out(block, self._ready[block], copies, keys)
            self._cache.let_go(self._ready.pop(block)[0])
        # A block is cached when the step is planned that computes its last tokens: this one.
        self._ready |= self._new
        self._new = {}
        if copies:
            inputs.kv_transfers = KVTransfers(copies, []).after(inputs.kv_transfers)
            self._launched.append(Launched(plan, keys, [place for _, place in copies]))

    @property
    def _has_room(self) -> bool:
        """True if a block may be stored: half of the places are left for loads."""
        return self._staging.num_free > self._staging.num_places // 2

    def _copy_out(
        self,
        block: int,
        entry: tuple[Prefix, int],
        copies: list[tuple[int, int]],
        keys: list[BlockKey],
    ) -> None:
        """Add the copy of a block, unless the connector has it."""
        key = self._keys.of_prefix(*entry)
        if not self._calls.find([key]):
            [place] = self._staging.take(1)
            copies.append((block, place))
            keys.append(key)

    def on_result(self, plan: Plan, result: StepResult) -> None:
        """Store the blocks that the step has copied."""
        while self._launched and any(step.plan is plan for step in self._launched):
            step = self._launched.popleft()
            views = self._staging.views(step.places)
            future = self._thread.submit(self._calls.store, step.keys, views)
            self._stores.append((future, step.places))

    def on_cleared(self) -> None:
        """Forget all blocks that have not been copied yet."""
        self._new, self._ready, self._leaving = {}, {}, {}
        self.on_reset()

    def on_reset(self) -> None:
        """Drop the copies of the steps in flight."""
        self._staging.discard_steps([place for step in self._launched for place in step.places])
        self._launched.clear()

    def close(self) -> None:
        """Store what was handed over, and release the connector."""
        self._thread.shutdown()
        self._calls.close()
