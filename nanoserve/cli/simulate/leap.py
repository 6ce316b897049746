"""Leaps: many decode steps at once, with the result that single steps have.

While no request arrives, ends or needs to be admitted, each step gives every running sequence one
token. The queues stay as they are, so what k such steps do is known in advance: k tokens for each
sequence, the blocks that these need, in the order in which the steps would allocate them, and k
times that follow from the sizes of the steps. A leap does this with a few operations per sequence
and per block, where steps need some per token.
"""

from bisect import bisect_left
from typing import Any, NamedTuple

import numpy as np

from nanoserve.cli.simulate.executor import SimulatedExecutor
from nanoserve.cli.simulate.step_time import StepSize
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import RequestOutputKind

_FEWEST = 3  # steps; shorter leaps cost more than steps
_MOST = 4096  # steps; bounds the arrays of a leap
# Methods of a scheduler that are not called in steps in which the queues stay as they are.
_NOT_IN_LEAPS = ("order", "add", "__init__")


class Leap(NamedTuple):
    """Decode steps of all running sequences. `ends` are the times at which the steps end.

    is_short_of_slots: requests wait for a slot during all of these steps.
    """

    start: float
    ends: np.ndarray
    sequences: list[Sequence]
    is_short_of_slots: bool = False

    def num_started_before(self, time: float) -> int:
        """Return how many of the steps start before `time`."""
        return 1 + bisect_left(self.ends, time) if self.start < time else 0

    def first(self, num_steps: int) -> "Leap":
        return self._replace(ends=self.ends[:num_steps])

    @property
    def durations(self) -> np.ndarray:
        return np.diff(self.ends, prepend=self.start)


def can_leap(engine: LLMEngine) -> bool:
    """Return True if steps in which nothing changes do the same for every engine of this kind.

    Not with async scheduling, where a step in flight is already planned, nor with a scheduler
    class that does something else in methods that such steps call.
    """
    kind = type(engine.scheduler)
    return (
        not engine.config.num_steps_ahead
        and not engine.scheduler.block_manager.has_windows
        and all(
            getattr(kind, name) is method
            for name, method in vars(Scheduler).items()
            if callable(method) and name not in _NOT_IN_LEAPS
        )
    )


def plan_leap(engine: LLMEngine, executor: SimulatedExecutor, start: float) -> Leap | None:
    """Return the longest leap from `start`, or None if single steps are needed or as fast.

    Extensions and observers want to see each step. The last token of a sequence is left to a step,
    which then makes the request's output.
    """
    scheduler = engine.scheduler
    is_full = len(scheduler.running) >= scheduler.max_num_seqs
    if engine.extensions or engine.observers or scheduler.held or not scheduler.running:
        return None
    if scheduler.waiting and not is_full:
        return None
    sequences = scheduler.running[:]
    num_steps = _MOST
    for seq in sequences:
        num_steps = min(num_steps, _tokens_before_end(seq, executor) - 1)
        if num_steps < _FEWEST:
            return None
    computed = np.array([seq.num_computed_tokens for seq in sequences])
    allocated = np.array([seq.num_allocated_tokens for seq in sequences])
    num_steps = _most_steps(scheduler, computed, allocated, num_steps)
    if num_steps < _FEWEST or not all(_is_plain(seq, executor, num_steps) for seq in sequences):
        return None
    contexts = executor.shares.decode_contexts(computed + 1, num_steps)
    rows = len(sequences)
    size = StepSize(rows, rows, rows, 0, contexts, 0.0)
    seconds = np.broadcast_to(executor.step_time.seconds(size) / executor.speed, num_steps)
    ends = np.cumsum(np.concatenate([[start], seconds]))[1:]  # adds in the order of the steps
    return Leap(start, ends, sequences, bool(scheduler.waiting))


def _tokens_before_end(seq: Sequence, executor: SimulatedExecutor) -> int:
    """Return after how many more tokens a sequence ends; 0 if it is not decoding."""
    if seq.num_computed_tokens + 1 != len(seq.token_ids) or not seq.num_output_tokens:
        return 0
    left = len(executor.script_of(seq.slot)) - seq.num_output_tokens
    return min(left, seq.max_num_tokens - len(seq.token_ids))


def _most_steps(scheduler: Scheduler, computed: Any, allocated: Any, num_steps: int) -> int:
    """Return for how many steps the free blocks suffice, so that none preempts a sequence."""
    size, free = scheduler.block_manager.block_size, scheduler.block_manager.num_free_blocks

    def needed(steps: int) -> int:
        missing = np.maximum(computed + steps - allocated, 0)
        return int((-(-missing // size)).sum())

    low, high = 0, num_steps
    if needed(high) <= free:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle - 1)
    return low


def _is_plain(seq: Sequence, executor: SimulatedExecutor, num_steps: int) -> bool:
    """Return True if the next tokens of a sequence neither end it nor make outputs."""
    first = seq.num_output_tokens
    is_final_only = seq.params.output_kind is RequestOutputKind.FINAL_ONLY
    next_ids = executor.script_of(seq.slot)[first : first + num_steps]
    return is_final_only and not seq.stop_conditions and seq.stop_token_ids.isdisjoint(next_ids)


def apply_leap(engine: LLMEngine, executor: SimulatedExecutor, leap: Leap) -> None:
    """Bring the engine into the state that it has after all steps of a leap."""
    num_steps, end = len(leap.ends), float(leap.ends[-1])
    scheduler, sequences = engine.scheduler, leap.sequences
    for seq in sequences:
        first = seq.num_output_tokens
        seq.token_ids += executor.script_of(seq.slot)[first : first + num_steps]
    _take_blocks(scheduler, sequences, num_steps)
    for seq in sequences:
        seq.num_computed_tokens += num_steps
        metrics = seq.metrics
        metrics.num_intervals += num_steps
        metrics.interval_seconds += end - seq.last_token_time
        metrics.num_output_tokens += num_steps
        metrics.last_token_time = seq.last_token_time = end
    executor.occupy_until(end, num_steps)


def _take_blocks(scheduler: Scheduler, sequences: list[Sequence], num_steps: int) -> None:
    """Allocate and cache blocks in the order of the steps.

    A step allocates the blocks of all its rows before it caches the blocks that they fill.
    """
    manager, events = scheduler.block_manager, []
    size = manager.block_size
    for index, seq in enumerate(sequences):
        computed = seq.num_computed_tokens
        first = seq.num_allocated_tokens - computed + 1
        events += [(step, 0, index) for step in range(first, num_steps + 1, size)]
        if manager.enable_prefix_caching:
            first = size - computed % size
            events += [(step, 1, index) for step in range(first, num_steps + 1, size)]
    for step, is_full, index in sorted(events):
        seq = sequences[index]
        if is_full:
            manager.cache(seq, seq.num_computed_tokens + step)
        elif not scheduler.grow(seq, step):
            raise RuntimeError("a leap needs more blocks than are free")
