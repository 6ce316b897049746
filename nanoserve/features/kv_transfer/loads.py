"""Loads KV blocks from a connector for the requests whose prompts it knows.

A request whose prompt the connector knows further than the engine does is held while the blocks are
loaded, in a thread. They are copied to the sequence's own blocks when it is admitted, and other
requests hit them there.
"""

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from nanoserve.engine.executor import ForwardInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.engine.listeners import BlockListener
from nanoserve.engine.plan import Plan
from nanoserve.engine.prefix_cache import Prefix
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.features.kv_transfer.block_keys import BlockKeys
from nanoserve.features.kv_transfer.calls import ConnectorCalls
from nanoserve.features.kv_transfer.connector import BlockKey, Prompt
from nanoserve.features.kv_transfer.host_places import HostPlaces
from nanoserve.features.kv_transfer.host_tier import within_blocks
from nanoserve.features.kv_transfer.load_rate import LoadRate
from nanoserve.features.kv_transfer.staging import Staging

if TYPE_CHECKING:
    from nanoserve.engine.guard import GuardedEngine

LOADING = "its K and V are loaded"  # the reason for which a request is held
_NUM_THREADS = 8
_WAIT = 0.005  # seconds, if there is nothing else to do


@dataclass(eq=False)
class Load:
    """A load of blocks from `first` on for a sequence, those of all layer groups in turn.

    deadline: after it the prompt is computed; -inf once the blocks must not be used.
    followers: sequences with the same blocks, which wait until `seq` has them.
    """

    seq: Sequence
    first: int
    keys: list[BlockKey]
    places: list[int]
    prompt: Prompt
    future: "Future[tuple[int, float]]"
    deadline: float
    followers: list[Sequence] = field(default_factory=list)
    num_blocks: int = 0  # loaded, of every group

    def invalidate(self) -> None:
        """Let the sequences compute their prompts."""
        self.deadline = -math.inf

    def abandon(self) -> None:
        """Let the connector know that no sequence waits."""
        self.prompt.abandoned.set()
        self.future.cancel()  # if it has not begun

    def use(self, num_blocks: int, num_groups: int) -> list[int]:
        """Keep the first blocks; returns the places of the others."""
        self.num_blocks = num_blocks
        kept = num_blocks * num_groups
        others, self.places = self.places[kept:], self.places[:kept]
        return others


class ConnectorLoads(Extension, BlockListener):
    """Holds the sequences for which blocks are loaded, and fills their blocks."""

    def __init__(
        self,
        engine: "GuardedEngine",
        calls: ConnectorCalls,
        keys: BlockKeys,
        staging: Staging,
        places: HostPlaces | None,
        load_timeout: float,
        is_enabled: Callable[[], bool],
    ) -> None:
        """`places` are those of the host tier, whose blocks need not be loaded; None without it."""
        self._engine, self._scheduler = engine, engine.scheduler
        self._manager = manager = engine.scheduler.block_manager
        self.calls, self.stats, self._keys = calls, calls.stats, keys
        self._staging, self._places, self._load_timeout = staging, places, load_timeout
        self._is_enabled, self.rate = is_enabled, LoadRate()
        self._num_groups = len(manager.windows)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "nanoserve-kv-load")
        # Loads under way, loads whose sequences wait for admission, and loads without a sequence.
        self._loads: dict[Sequence, Load] = {}
        self._loaded: dict[Sequence, Load] = {}
        self._abandoned: list[Load] = []
        # For the next step: (place, block), and all places of the sequences admitted in it.
        self._to_device: list[tuple[int, int]] = []
        self._read: list[int] = []
        self._in_flight: deque[tuple[Plan, float]] = deque()  # steps, and when they began
        manager.listeners.append(self)

    # ------------------------------------------------------------------ start and end

    def on_add(self, seq: Sequence) -> str | None:
        """Start to load what the engine does not have of a prompt, if the connector has it."""
        if seq.needs_prompt_outputs or not self._is_enabled():
            return None
        end = (seq.num_prompt_tokens - 1) // self._manager.block_size
        first = self._num_here(seq, end)
        keys = self._keys.of_sequence(seq, first, end)
        self.stats.queries += seq.num_prompt_tokens - first * self._manager.block_size
        if not keys:
            return None
        for load in self._loads.values():
            if self._may_follow(load, keys):
                load.followers.append(seq)
                return LOADING
        return LOADING if self._start(seq, first, keys) else None

    def _may_follow(self, load: Load, keys: list[BlockKey]) -> bool:
        """Return True if a sequence waits for this load, instead of one of its own.

        What it does not bring is computed, and a connector may want to load even that.
        """
        is_whole = load.keys[len(keys) - 1 : len(keys)] == keys[-1:]
        return load.keys[0] == keys[0] and (is_whole or not self.calls.always_loads)

    def _num_here(self, seq: Sequence, end: int) -> int:
        """Return how many of the first blocks the KV cache or the host tier has."""

        def is_here(prefix: Prefix) -> bool:
            on_host = self._places if self._places is not None else ()
            return all(own or (prefix, g) in on_host for g, own in enumerate(prefix.blocks))

        return sum(1 for _ in takewhile(is_here, self._manager.prefix_cache.chain(seq, end)))

    def _start(self, seq: Sequence, first: int, keys: list[BlockKey]) -> bool:
        """Start a load if blocks are found, there is room, and it is expected to save time."""
        num_free = self._staging.num_free
        keys = keys[: num_free - num_free % self._num_groups]
        num_keys = self.calls.find(keys, self._prompt(seq, first, len(keys))) if keys else 0
        num_keys -= num_keys % self._num_groups
        num_tokens = num_keys // self._num_groups * self._manager.block_size
        if not num_keys or not (self.calls.always_loads or self.rate.pays(num_keys, num_tokens)):
            return False
        keys, places = keys[:num_keys], self._staging.take(num_keys)
        prompt = self._prompt(seq, first, num_keys)
        future = self._threads.submit(self.calls.load, keys, self._staging.views(places), prompt)
        deadline = self._engine.clock() + self._load_timeout
        self._loads[seq] = Load(seq, first, keys, places, prompt, future, deadline)
        return True

    def _prompt(self, seq: Sequence, first: int, num_keys: int) -> Prompt:
        """Return the prompt up to the end of the last of `num_keys` keys from block `first` on."""
        end = (first + num_keys // self._num_groups) * self._manager.block_size
        return Prompt(seq.token_ids[:end], seq.cache_key)

    def on_step_start(self) -> None:
        """Release the sequences whose load has ended, or takes too long."""
        for load in [load for load in self._abandoned if load.future.done()]:
            self._abandoned.remove(load)
            self._staging.give_back(load.places)
        if not self._loads:
            return
        scheduler = self._scheduler
        if not (scheduler.waiting or scheduler.running or self._engine.plans_under_way):
            wait([load.future for load in self._loads.values()], _WAIT, FIRST_COMPLETED)
        for load in list(self._loads.values()):
            if load.future.done() or self._engine.clock() > load.deadline:
                self._end(load)

    def _end(self, load: Load) -> None:
        """Release the sequences of a load, which keep what has been loaded in time."""
        del self._loads[load.seq]
        is_valid = load.deadline > -math.inf
        is_held = load.seq.status is SequenceStatus.HELD  # otherwise it was never queued
        if load.future.done() and is_valid and is_held:
            num_keys, seconds = load.future.result()
            self.rate.note_load(num_keys, seconds)
            others = load.use(num_keys // self._num_groups, self._num_groups)
            self._staging.give_back(others)
            self._loaded[load.seq] = load
        else:
            self.stats.num_late += is_valid and is_held
            self._abandon(load)
        self._scheduler.release([load.seq, *load.followers], LOADING)

    def _abandon(self, load: Load) -> None:
        load.abandon()
        self._abandoned.append(load)

    def on_release(self, seq: Sequence) -> None:
        """Abandon the load of a sequence that has ended."""
        if not seq.finished:
            return
        if (loaded := self._loaded.pop(seq, None)) is not None:
            self._staging.give_back(loaded.places)
        if (load := self._loads.pop(seq, None)) is not None:
            self._abandon(load)
            self._scheduler.release(load.followers, LOADING)

    # ------------------------------------------------------------------ fill

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

    def forward_inputs(self, plan: Plan, inputs: ForwardInputs) -> None:
        """Add the copies from staging places to blocks."""
        if self._to_device:
            inputs.kv_transfers = KVTransfers([], self._to_device).after(inputs.kv_transfers)
        self._staging.begin_step(plan, self._read)
        self._in_flight.append((plan, self._engine.clock()))
        self._to_device, self._read = [], []

    def on_result(self, plan: Plan, result: StepResult) -> None:
        self._staging.end_step(plan)
        if self._in_flight and self._in_flight[0][0] is plan:  # otherwise it was discarded
            _, began = self._in_flight.popleft()
            self.rate.note_step(plan.num_tokens, self._engine.clock() - began)

    def on_cleared(self) -> None:
        """Use nothing that was loaded before."""
        for load in self._loads.values():
            load.invalidate()
        for load in self._loaded.values():
            self._staging.give_back(load.places)
        self._loaded = {}
        self.on_reset()

    def on_reset(self) -> None:
        self._staging.discard_steps(self._read)
        self._to_device, self._read = [], []
        self._in_flight.clear()

    def close(self) -> None:
        for load in [*self._loads.values(), *self._abandoned]:
            load.abandon()
        self._threads.shutdown()
