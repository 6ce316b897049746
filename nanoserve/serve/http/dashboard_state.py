"""The state of the engine for the live view, and the difference between two states.

Every visitor of the page can see the state. It therefore has counts, times and block numbers of all
requests, but no content: no tokens, text or request ids. A sequence is identified by its arrival
number.

A *snapshot*, the JSON form of a state, has these members:

    pool          num_blocks, block_size, enable_prefix_caching; max_num_seqs
    tables        {arrival: runs}: the block table of each running sequence
    cached        runs: the blocks in the prefix cache
    requests      running sequences in order of admission: [arrival, prompt tokens, prompt tokens
                  that were cached on arrival, computed tokens, output tokens]
    waiting       the head of the waiting queue, in the same format
    numbers       totals, and times in seconds; see `StepTotals.read`

where `runs` are [first, length, first, length, ...]: block 5, then 8, 9 and 10 are [5, 1, 8, 3]. A
*change* has the current `requests`, `waiting` and `numbers`, and these members:

    tables        {arrival: [kept, runs]}: for each changed table, the number of its leading blocks
                  that are unchanged, and the blocks after them
    ended         arrival numbers whose tables were released
    cached        {"added": runs, "removed": runs}
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.engine.stopwatch import StepTimes

_MOST_WAITING = 32  # waiting sequences that are listed one by one; all are counted
_MOST_TTFTS = 32


class Occupancy(NamedTuple):
    """A copy of the KV block state at one moment, which later steps do not change.

    tables: block table of each running sequence, by arrival number; other sequences hold no blocks.
    cached: one byte per block, 1 if it is in the prefix cache, whether or not a sequence uses it;
    entry 0 is the dummy block.
    """

    tables: dict[int, list[int]]
    cached: bytes

    @classmethod
    def of(cls, scheduler: Scheduler) -> "Occupancy":
        """Copy the state between two steps. O(number of blocks): milliseconds for 100,000 blocks.

        With async scheduling, this is the state in which the step in flight was scheduled.
        """
        tables = {seq.arrival: list(seq.block_table) for seq in scheduler.running}
        return cls(tables, scheduler.block_manager.snapshot())


@dataclass(frozen=True)
class State:
    """The state of the engine between two steps. Reading it there took `read_seconds`."""

    pool: dict[str, Any]
    occupancy: Occupancy
    requests: list[list[int]]
    waiting: list[list[int]]
    numbers: dict[str, Any]
    read_seconds: float

    @property
    def is_idle(self) -> bool:
        numbers = self.numbers
        return not (self.requests or numbers["num_waiting"] or numbers["num_held"])


class StepTotals:
    """A step observer that only counts, so that the live view adds almost no cost to a step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._num_computed = self._num_output_tokens = self._num_first_tokens = 0
        self._step_seconds = 0.0
        self._ttfts: deque[float] = deque(maxlen=_MOST_TTFTS)

    def __call__(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        self.num_steps += 1
        self._num_computed += plan.num_tokens
        self._num_output_tokens += sum(map(len, result.token_ids))
        self._step_seconds += times.schedule + times.pack + times.execute + times.update
        for row in plan.sampled:
            if row.start + row.n == row.seq.num_prompt_tokens:
                self._note_first_token(row.seq)

    def _note_first_token(self, seq: Sequence) -> None:
        ttft = seq.metrics.time_to_first_token
        if seq.index == 0 and ttft is not None:  # siblings share one time
            self._num_first_tokens += 1
            self._ttfts.append(round(ttft, 6))

    def read(self, engine: GuardedEngine) -> State:
        """Read the state; call it on the engine's thread, between two steps.

        The totals in `numbers` count from the start of this observer. Only the totals of the prefix
        cache and of preemptions count from the start of the engine. `ttfts` are the times to
        first token of the latest requests, in seconds, oldest first.
        """
        began = engine.clock()
        scheduler, stats, config = engine.scheduler, engine.stats, engine.config
        pool = {
            "num_blocks": scheduler.block_manager.num_blocks,
            "block_size": config.block_size,
            "enable_prefix_caching": config.enable_prefix_caching,
            "max_num_seqs": config.max_num_seqs,
        }
        numbers = {
            "time": round(began, 6),
            "num_steps": self.num_steps,
            "step_seconds": round(self._step_seconds, 6),
            "num_computed_tokens": self._num_computed,
            "num_output_tokens": self._num_output_tokens,
            "num_first_tokens": self._num_first_tokens,
            "ttfts": list(self._ttfts),
            "num_waiting": len(scheduler.waiting),
            "num_held": len(scheduler.held),
            "num_preemptions": stats.num_preemptions,
            "prefix_cache_queries": stats.prefix_cache_queries,
            "prefix_cache_hits": stats.prefix_cache_hits,
        }
        requests = [_request(seq) for seq in scheduler.running]
        waiting = [_request(seq) for seq in islice(scheduler.waiting, _MOST_WAITING)]
        blocks = Occupancy.of(scheduler)
        return State(pool, blocks, requests, waiting, numbers, engine.clock() - began)


def start_counting(engine: GuardedEngine) -> None:
    """Add an observer for the live view."""
    engine.observers.append(StepTotals())


def read_state(num_steps: int | None, engine: GuardedEngine) -> State | None:
    """Return the state; None if there was no step since `num_steps`, so nothing has changed."""
    *_, totals = _counting(engine)
    return None if totals.num_steps == num_steps else totals.read(engine)


def stop_counting(engine: GuardedEngine) -> None:
    """Remove the oldest observer of the live view, if there is one."""
    for totals in _counting(engine)[:1]:
        engine.observers.remove(totals)


def _counting(engine: GuardedEngine) -> list[StepTotals]:
    return [observer for observer in engine.observers if isinstance(observer, StepTotals)]


def _request(seq: Sequence) -> list[int]:
    return [
        seq.arrival,
        seq.num_prompt_tokens,
        seq.metrics.num_cached_prompt_tokens or 0,
        seq.num_computed_tokens,
        seq.num_output_tokens,
    ]


def snapshot(state: State) -> dict[str, Any]:
    """Return the complete `state` as a snapshot; see the module's docstring."""
    tables = {str(seq): runs(table) for seq, table in state.occupancy.tables.items()}
    cached = runs(_set(_flags(state.occupancy.cached)))
    return {"pool": state.pool, "tables": tables, "cached": cached} | _as_it_is_now(state)


def change(before: State, now: State) -> dict[str, Any]:
    """Return the change from `before` to `now`; see the module's docstring."""
    old, new = before.occupancy, now.occupancy
    tables = {}
    for seq, table in new.tables.items():
        known = old.tables.get(seq, [])
        if table != known:
            num_kept = _num_common(known, table)
            tables[str(seq)] = [num_kept, runs(table[num_kept:])]
    was, is_now = _flags(old.cached), _flags(new.cached)
    cached = {"added": runs(_set(is_now > was)), "removed": runs(_set(was > is_now))}
    ended = [seq for seq in old.tables if seq not in new.tables]
    return {"tables": tables, "ended": ended, "cached": cached} | _as_it_is_now(now)


def _as_it_is_now(state: State) -> dict[str, Any]:
    return {"requests": state.requests, "waiting": state.waiting, "numbers": state.numbers}


def _flags(cached: bytes) -> np.ndarray:
    return np.frombuffer(cached, np.uint8)


def _set(flags: np.ndarray) -> list[int]:
    """Return the numbers of the blocks whose flag is set, in ascending order."""
    return np.flatnonzero(flags).tolist()


def _num_common(a: list[int], b: list[int]) -> int:
    """Return the number of equal leading blocks. Fast if one table extends the other, as usual."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])


def runs(blocks: Iterable[int]) -> list[int]:
    """Return blocks as runs of consecutive numbers: [first, length, first, length, ...]."""
    found: list[int] = []
    following = None
    for block in blocks:
        if block == following:
            found[-1] += 1
        else:
            found += [block, 1]
        following = block + 1
    return found
