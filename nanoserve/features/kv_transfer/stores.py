"""Stores the KV blocks of an engine in a connector.

Every full block is stored once, when its K and V have been computed: a step copies it to a staging
place, and when that step has ended, a thread gives it to the connector.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.listeners import BlockListener, CachedBlock
from nanoserve.engine.plan import Plan
from nanoserve.engine.prefix_cache import Prefix
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.kv_transfer.block_keys import BlockKeys
from nanoserve.features.kv_transfer.calls import ConnectorCalls
from nanoserve.features.kv_transfer.connector import BlockKey
from nanoserve.features.kv_transfer.staging import Staging


@dataclass(eq=False)
class Outgoing:
    """The blocks that are copied to staging places before the model of a step runs, or after it."""

    plan: Plan
    keys: list[BlockKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def add(self, key: BlockKey, block: int, place: int) -> None:
        self.keys.append(key)
        self.blocks.append(block)
        self.places.append(place)

    @property
    def transfers(self) -> KVTransfers:
        return KVTransfers(list(zip(self.blocks, self.places, strict=True)), [])


class ConnectorStores(Extension, BlockListener):
    """Gives a connector what the engine computes. It comes after `ConnectorLoads`."""

    def __init__(
        self,
        scheduler: Scheduler,
        calls: ConnectorCalls,
        keys: BlockKeys,
        staging: Staging,
        is_enabled: Callable[[], bool],
        copy_now: Callable[[KVTransfers], None],
    ) -> None:
        """`copy_now` copies blocks when no step comes that could, and waits for it."""
        self._scheduler, self._cache = scheduler, scheduler.block_manager.prefix_cache
        self._copy_now = copy_now
        self._calls, self.stats, self._keys = calls, calls.stats, keys
        self._staging, self._is_enabled = staging, is_enabled
        self._thread = ThreadPoolExecutor(1, "nanoserve-kv-store")  # one: parents come first
        # Blocks to be stored, with their prefixes and groups: those that were cached since the last
        # step was launched, those that were cached before that, and those that have been evicted.
        self._new: dict[int, tuple[Prefix, int]] = {}
        self._ready: dict[int, tuple[Prefix, int]] = {}
        self._leaving: dict[int, tuple[Prefix, int]] = {}
        self._launched: deque[Outgoing] = deque()
        self._in_flight: list[Plan] = []  # steps
        self._stores: list[tuple[Future[None], list[int]]] = []
        scheduler.block_manager.listeners.append(self)

    def on_cached(self, cached: CachedBlock) -> None:
        """Note a block to be stored; its K and V are complete after the step at hand."""
        is_new = not cached.is_copy or self._calls.is_awaited
        if is_new and self._is_enabled():
            self._new[cached.block] = self._cache.keep(cached.block_hash), cached.group

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        """Note that a block is stored by the next step or never: it gets another content."""
        for waiting in (self._ready, self._new):
            if block in waiting:
                self._leaving[block] = waiting.pop(block)

    def on_admit(self, seq: Sequence) -> int:
        """Note the blocks that a sequence has found, for a connector that drops what it had."""
        if self._calls.is_awaited and self._is_enabled():
            num_blocks = seq.num_computed_tokens // self._cache.block_size
            for prefix in self._cache.chain(seq, num_blocks):
                for group, own in enumerate(prefix.blocks):
                    if own and not any(each in self._ready or each in self._new for each in own):
                        self._ready[own[0]] = self._cache.keep(prefix.block_hash), group
        return 0

    def on_step_start(self) -> None:
        """Free the places whose blocks have been stored."""
        for each in [each for each in self._stores if each[0].done()]:
            self._stores.remove(each)
            self._staging.give_back(each[1])

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Add the copies from blocks to staging places."""
        self._in_flight.append(plan)
        outgoing = Outgoing(plan)
        self._take_leaving(outgoing)
        self._take_places(outgoing)
        # A block is cached when the step is planned that computes its last tokens: this one.
        self._ready |= self._new
        self._new = {}
        if outgoing.keys:
            inputs.kv_transfers = outgoing.transfers.after(inputs.kv_transfers)
            self._launched.append(outgoing)

    @property
    def _has_room(self) -> bool:
        """True if a block may be stored: half of the places are left for loads."""
        return self._staging.num_free > self._staging.num_places // 2

    def _take_leaving(self, outgoing: Outgoing) -> None:
        """Add the blocks that have been evicted since the last step was launched, or miss them."""
        leaving, self._leaving = self._leaving, {}
        # A chain is evicted from its tail, and stored from its head.
        for block, entry in reversed(leaving.items()):
            if self._has_room:
                self._take_place(block, entry, outgoing)
            else:
                self.stats.num_not_stored += 1
            self._cache.let_go(entry[0])

    def _take_places(self, outgoing: Outgoing) -> None:
        """Add as many of the blocks that are ready as have room."""
        while self._ready and self._has_room:
            block = next(iter(self._ready))
            self._take_place(block, self._ready[block], outgoing)
            self._cache.let_go(self._ready.pop(block)[0])

    def _take_place(self, block: int, entry: tuple[Prefix, int], outgoing: Outgoing) -> None:
        """Add a block, unless the connector has it."""
        key = self._keys.of_prefix(*entry)
        if not self._calls.find([key]):
            [place] = self._staging.take(1)
            outgoing.add(key, block, place)

    def on_result(self, plan: Plan, result: StepResult) -> None:
        """Store the blocks that the step has copied; all others, too, if no later step copies them.

        Those that are awaited do not wait for one.
        """
        self._in_flight = [each for each in self._in_flight if each is not plan]
        while self._launched and any(each.plan is plan for each in self._launched):
            self._store(self._launched.popleft())
        is_urgent = self._calls.is_awaited and not self._in_flight
        if is_urgent or self._is_last(plan):
            self._flush(plan)

    def _is_last(self, plan: Plan) -> bool:
        """Return True if no step comes after this one.

        A sequence of which only a head reads, as for pooling, is still running here: it ends with
        what the head has read of its last token.
        """
        scheduler = self._scheduler
        ends = {row.seq for row in plan.rows if row.start + row.n == row.seq.max_num_tokens}
        return not (scheduler.waiting or scheduler.held) and ends.issuperset(scheduler.running)

    def _flush(self, plan: Plan) -> None:
        """Store what a later step would copy."""
        self._ready |= self._new
        self._new = {}
        outgoing = Outgoing(plan)
        self._take_leaving(outgoing)
        self._take_places(outgoing)
        if outgoing.keys:
            self._copy_now(outgoing.transfers)
            self._store(outgoing)

    def _store(self, outgoing: Outgoing) -> None:
        views = self._staging.views(outgoing.places)
        future = self._thread.submit(self._calls.store, outgoing.keys, views)
        self._stores.append((future, outgoing.places))

    def on_cleared(self) -> None:
        """Forget all blocks that have not been copied yet."""
        self._new, self._ready, self._leaving = {}, {}, {}
        self._drop_copies()

    def on_reset(self) -> None:
        self._in_flight = []
        self._drop_copies()

    def _drop_copies(self) -> None:
        """Drop the copies of the steps in flight."""
        self._staging.discard_steps([place for each in self._launched for place in each.places])
        self._launched.clear()

    def close(self) -> None:
        """Store what was handed over, and release the connector."""
        self._thread.shutdown()
        self._calls.close()
