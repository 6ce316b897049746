"""Measure the parts of steps, which are schedule, pack, model, sample and update."""

import time
from typing import Any, NamedTuple

import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.stopwatch import StepTimes

PARTS = ("schedule", "pack", "model", "sample", "update")


class StepParts(NamedTuple):
    """The seconds of one step by part. `between` is the time outside all parts before it."""

    num_rows: int
    context: float  # mean over the rows
    is_decode: bool
    schedule: float
    pack: float
    model: float
    sample: float
    update: float
    between: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in PARTS) + self.between

    @property
    def own_share(self) -> float:
        return 1 - self.model / self.total


class StepTimer:
    """An observer that appends the times of every step of `engine` to `steps`.

    The engine measures its own parts. The time of the sampler is subtracted from the executor's. On
    a GPU the sampler only launches kernels, so its time is measured between two CUDA events.
    """

    def __init__(self, engine: GuardedEngine) -> None:
        self.steps: list[StepParts] = []
        self._sampling: float | None = 0.0
        self._events: Any = None
        self._last_end: float | None = None
        executor: Any = engine.executor
        sampler = getattr(executor, "sampler", None)
        if sampler is not None:  # with tensor parallelism, sampling counts as the model
            self._sample, sampler.sample = sampler.sample, self._timed_sample
            if executor.context.device.type == "cuda":
                self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        engine.observers.append(self._observe)

    def _timed_sample(self, *args: Any) -> Any:
        if self._events is not None:
            self._events[0].record()
            result = self._sample(*args)
            self._events[1].record()
            self._sampling = None  # known after the step
            return result
        start = time.perf_counter()
        result = self._sample(*args)
        self._sampling = time.perf_counter() - start
        return result

    def _observe(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        end = time.perf_counter()
        if self._sampling is None:
            self._sampling = self._events[0].elapsed_time(self._events[1]) / 1000
        sample, self._sampling = self._sampling, 0.0
        inside = times.schedule + times.pack + times.execute + times.update
        between = 0.0 if self._last_end is None else max(0.0, end - self._last_end - inside)
        header = batch.header
        context = float(batch.context_lens[: header.num_rows].mean())
        model = times.execute - sample
        parts = (times.schedule, times.pack, model, sample, times.update, between)
        self.steps.append(StepParts(header.num_rows, context, header.max_query_len == 1, *parts))
        self._last_end = time.perf_counter()
