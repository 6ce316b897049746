"""Moves KV blocks between the KV cache and a connector.

Every full block is stored once, when its K and V have been computed. A request whose prompt the
connector knows further than the engine does is held while the blocks are loaded, in a thread. They
are copied to the sequence's own blocks when it is admitted, so that other requests hit them there.
"""

import logging
import math
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.listeners import BlockListener, CachedBlock
from nanoserve.engine.plan import Plan
from nanoserve.engine.prefix_cache import Prefix
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.features.kv_transfer.block_keys import BlockKeys
from nanoserve.features.kv_transfer.config import KVTransferConfig
from nanoserve.features.kv_transfer.connector import BlockKey, KVConnector
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import within_blocks
from nanoserve.features.kv_transfer.load_rate import LoadRate
from nanoserve.features.kv_transfer.staging import Staging

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

logger = logging.getLogger(__name__)

LOADING = "its K and V are loaded"  # the reason for which a request is held
_LOAD_THREADS = 8
_WAIT = 0.005  # seconds, if there is nothing else to do


@dataclass
class TransferStats:
    """Totals since the start."""

    num_stored: int = 0  # blocks given to the connector
    num_not_stored: int = 0  # blocks evicted while all staging places were in use
    num_loaded: int = 0  # blocks that the connector has loaded
    num_late: int = 0  # loads that took longer than the time limit
    num_failed: int = 0  # calls of the connector that raised an exception
    hits: int = 0  # prompt tokens that were loaded instead of computed


@dataclass(eq=False)
class Load:
    """A load of blocks from `first` on for a sequence, those of all layer groups in turn.

    followers: sequences with the same blocks, which wait until `seq` has them.
    """

    seq: Sequence
    first: int
    keys: list[BlockKey]
    places: list[int]
    future: "Future[tuple[int, float]]"
    deadline: float
    num_blocks: int = 0  # loaded, of every group
    followers: list[Sequence] = field(default_factory=list)


class Launched(NamedTuple):
    """A step in flight that copies blocks with these keys to these places."""

    plan: Plan
    keys: list[BlockKey]
    places: list[int]
    began: float


class ConnectorTransfers(Extension, BlockListener):
    """Holds and fills sequences from a connector, and gives it what they compute."""

    def __init__(
        self,
        engine: "GuardedEngine",
        connector: KVConnector,
        config: KVTransferConfig,
        keys: BlockKeys,
        staging: Staging,
        places: HostPlaces | None,
        load_timeout: float,
    ) -> None:
        """`places` are those of the host tier, whose blocks need not be loaded; None without it."""
        self._engine, self._scheduler = engine, engine.scheduler
        self._manager = manager = engine.scheduler.block_manager
        self._cache, self._num_groups = manager.prefix_cache, len(manager.windows)
        self._connector, self._config, self._keys = connector, config, keys
        self._staging, self._places, self._load_timeout = staging, places, load_timeout
        self.stats, self.rate = TransferStats(), LoadRate()
        self._loaders = ThreadPoolExecutor(_LOAD_THREADS, "nanoserve-kv-load")
        self._storer = ThreadPoolExecutor(1, "nanoserve-kv-store")
        # Loads under way, loads whose sequences wait for admission, and those nobody waits for.
        self._loads: dict[Sequence, Load] = {}
        self._loaded: dict[Sequence, Load] = {}
        self._abandoned: list[Load] = []
        # For the next step: (place, block), and the places of all sequences admitted in it.
        self._to_device: list[tuple[int, int]] = []
        self._read: list[int] = []
        # Blocks to be stored: cached since the last step was launched, before that, and evicted.
        self._new: dict[int, tuple[Prefix, int]] = {}
        self._ready: dict[int, tuple[Prefix, int]] = {}
        self._leaving: dict[int, tuple[Prefix, int]] = {}
        self._launched: deque[Launched] = deque()
        self._stores: list[tuple[Future[None], list[int]]] = []
        manager.listeners.append(self)

    # ------------------------------------------------------------------ load

    def on_add(self, seq: Sequence) -> str | None:
        """Start to load what the engine does not have of a prompt, if the connector has it."""
        # The fingerprint in the keys is that of the weights with which the engine has started.
        if not self._config.loads or seq.needs_prompt_outputs or self._engine.loop.weights_id:
            return None
        size = self._manager.block_size
        end = (seq.num_prompt_tokens - 1) // size
        first = self._num_here(seq, end)
        keys = self._keys.of_sequence(seq, first, end)
        if not keys:
            return None
        for load in self._loads.values():
            if load.keys[0] == keys[0]:
                load.followers.append(seq)
                return LOADING
        return LOADING if self._start(seq, first, keys) else None

    def _num_here(self, seq: Sequence, end: int) -> int:
        """Return how many of the first blocks the KV cache or the host tier has."""

        def is_here(prefix: Prefix) -> bool:
            on_host = self._places if self._places is not None else ()
            return all(own or (prefix, g) in on_host for g, own in enumerate(prefix.blocks))

        return sum(1 for _ in takewhile(is_here, self._cache.chain(seq, end)))

    def _start(self, seq: Sequence, first: int, keys: list[BlockKey]) -> bool:
        """Start a load if blocks are found, there is room, and it is expected to save time."""
        num_keys = min(self._find(keys), self._staging.num_free)
        num_keys -= num_keys % self._num_groups
        num_tokens = num_keys // self._num_groups * self._manager.block_size
        if not num_keys or not self.rate.pays(num_keys, num_tokens):
            return False
        places, now = self._staging.take(num_keys), self._engine.clock()
        views = self._staging.views(places)
        future = self._loaders.submit(self._load, keys[:num_keys], views)
        deadline = now + self._load_timeout
        self._loads[seq] = Load(seq, first, keys[:num_keys], places, future, deadline)
        return True

    def _load(self, keys: list[BlockKey], memory: list[np.ndarray]) -> tuple[int, float]:
        """Return the number of loaded blocks and the seconds they took; in a thread."""
        began = self._engine.clock()
        num_keys = self._connector.load(keys, memory)
        return num_keys, self._engine.clock() - began

    def _find(self, keys: list[BlockKey]) -> int:
        try:
            return self._connector.find(keys)
        except Exception:
            self._note_failure("find")
            return 0

    def on_step_start(self) -> None:
        """Release the sequences whose load has ended, or takes too long."""
        if self._loads:
            scheduler = self._scheduler
            if not (scheduler.waiting or scheduler.running or self._engine.loop.plans_under_way):
                wait([load.future for load in self._loads.values()], _WAIT, FIRST_COMPLETED)
            for load in list(self._loads.values()):
                if load.future.done() or self._engine.clock() > load.deadline:
                    self._end(load)
        for load in [load for load in self._abandoned if load.future.done()]:
            self._abandoned.remove(load)
            self._staging.give_back(load.places)
        for each in [each for each in self._stores if each[0].done()]:
            self._stores.remove(each)
            self._staging.give_back(each[1])
            if each[0].exception() is not None:
                self._note_failure("store", each[0].exception())

    def _end(self, load: Load) -> None:
        """Release the sequences of a load, which keep what has been loaded in time."""
        del self._loads[load.seq]
        is_held = load.seq.status is SequenceStatus.HELD  # otherwise it was never queued
        if load.future.done() and is_held and load.deadline > -math.inf:
            load.num_blocks = self._result(load)
            self._loaded[load.seq] = load
        else:
            self.stats.num_late += 1
            self._abandoned.append(load)
        self._scheduler.release([load.seq, *load.followers], LOADING)

    def _result(self, load: Load) -> int:
        """Return how many blocks have been loaded, of every group; gives back the other places."""
        try:
            num_keys, seconds = load.future.result()
        except Exception as error:
            self._note_failure("load", error)
            num_keys, seconds = 0, 0.0
        num_keys = max(0, min(num_keys, len(load.keys)))
        self.rate.note_load(num_keys, seconds)
        num_blocks = num_keys // self._num_groups
        self._staging.give_back(load.places[num_blocks * self._num_groups :])
        del load.places[num_blocks * self._num_groups :]
        self.stats.num_loaded += len(load.places)
        return num_blocks

    def on_admit(self, seq: Sequence) -> int:
        """Fill the blocks after those that the engine has had itself."""
        load = self._loaded.pop(seq, None)
        if load is None:
            return 0
        self._read += load.places
        size = self._manager.block_size
        at = seq.num_computed_tokens // size
        end = min(load.first + load.num_blocks, (seq.num_allocated_tokens - 1) // size)
        if at < load.first or at >= end:  # something before it has been evicted meanwhile
            return 0
        for index in range(at, end):
            for group, table in enumerate(seq.block_tables):
                place = load.places[(index - load.first) * self._num_groups + group]
                self._to_device.append((place, table[index]))
        self.stats.hits += (end - at) * size
        return (end - at) * size

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return within_blocks(seq, num_tokens, plan)

    def on_release(self, seq: Sequence) -> None:
        """Abandon the load of a sequence that has ended."""
        if not seq.finished:
            return
        if (loaded := self._loaded.pop(seq, None)) is not None:
            self._staging.give_back(loaded.places)
        if (load := self._loads.pop(seq, None)) is not None:
            self._abandoned.append(load)
            self._scheduler.release(load.followers, LOADING)

    # ------------------------------------------------------------------ store

    def on_cached(self, cached: CachedBlock) -> None:
        """Note a block to be stored; its K and V are complete after the step at hand."""
        if self._config.stores and not cached.is_copy and not self._engine.loop.weights_id:
            self._new[cached.block] = self._cache.keep(cached.block_hash), cached.group

    def on_removed(self, block: int, block_hash: bytes, group: int, is_last: bool) -> None:
        """Note that a block is stored by the next step or never: it gets another content."""
        for waiting in (self._ready, self._new):
            if block in waiting:
                self._leaving[block] = waiting.pop(block)

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Add the copies between blocks and staging places."""
        to_host: list[tuple[int, int]] = []
        keys: list[BlockKey] = []
        leaving, self._leaving = self._leaving, {}
        # A chain is evicted from its tail, and stored from its head.
        for block, entry in reversed(leaving.items()):
            if self._has_room:
                self._copy_out(block, entry, to_host, keys)
            else:
                self.stats.num_not_stored += 1
            self._cache.let_go(entry[0])
        while self._ready and self._has_room:
            block = next(iter(self._ready))
            self._copy_out(block, self._ready[block], to_host, keys)
            self._cache.let_go(self._ready.pop(block)[0])
        # A block is cached when the step is planned that computes its last tokens: this one.
        self._ready |= self._new
        self._new = {}
        if to_host or self._to_device:
            copies = KVTransfers(to_host, self._to_device)
            inputs.kv_transfers = copies.after(inputs.kv_transfers)
        self._staging.begin_step(plan, self._read)
        places = [place for _, place in to_host]
        self._launched.append(Launched(plan, keys, places, self._engine.clock()))
        self._to_device, self._read = [], []

    @property
    def _has_room(self) -> bool:
        """True if a block may be stored: half of the places are left for loads."""
        return self._staging.num_free > self._staging.num_places // 2

    def _copy_out(
        self,
        block: int,
        entry: tuple[Prefix, int],
        to_host: list[tuple[int, int]],
        keys: list[BlockKey],
    ) -> None:
        """Add the copy of a block, unless the connector has it."""
        key = self._keys.of_prefix(*entry)
        if not self._find([key]):
            [place] = self._staging.take(1)
            to_host.append((block, place))
            keys.append(key)

    def on_result(self, plan: Plan, result: StepResult) -> None:
        """Store the blocks that the step has copied."""
        self._staging.end_step(plan)
        if not self._launched or self._launched[0].plan is not plan:
            return  # it was in flight when the prefix cache was cleared
        step = self._launched.popleft()
        self.rate.note_step(plan.num_tokens, self._engine.clock() - step.began)
        if step.keys:
            views = self._staging.views(step.places)
            future = self._storer.submit(self._connector.store, step.keys, views)
            self._stores.append((future, step.places))
            self.stats.num_stored += len(step.keys)

    # ------------------------------------------------------------------ states

    def on_cleared(self) -> None:
        """Forget all blocks, and load nothing for what was computed before."""
        self._new, self._ready, self._leaving = {}, {}, {}
        for load in self._loads.values():
            load.deadline = -math.inf
        for load in self._loaded.values():
            self._staging.give_back(load.places)
        self._loaded = {}
        self._discard()

    def on_reset(self) -> None:
        self._discard()

    def _discard(self) -> None:
        """Drop the copies of the steps in flight, and of the next one."""
        places = [place for step in self._launched for place in step.places]
        self._staging.discard_steps([*self._read, *places])
        self._to_device, self._read = [], []
        self._launched.clear()

    def _note_failure(self, method: str, error: BaseException | None = None) -> None:
        self.stats.num_failed += 1
        if self.stats.num_failed == 1:
            name = type(self._connector).__qualname__
            logger.warning(
                "%s.%s of the KV connector raised an exception; later ones are counted, and not "
                "logged",
                name,
                method,
                exc_info=error if error is not None else True,
            )

    def close(self) -> None:
        """Store what was handed over, and release the connector."""
        for load in [*self._loads.values(), *self._abandoned]:
            load.future.cancel()
        self._loaders.shutdown()
        self._storer.shutdown()
        self._connector.close()
