"""Serve the requests of simulated traffic with a real engine, in real time, and measure the same.

It verifies a prediction: the summary has the names of a simulated one, and the measured steps are
what a step time is fitted to.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from nanoserve.cli.simulate.fit import MeasuredStep, StepSizes
from nanoserve.cli.simulate.replica import TokenTimes
from nanoserve.cli.simulate.results import Finished, Results
from nanoserve.cli.simulate.traffic import Arrival, RequestMaker, Traffic
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import StepResult
from nanoserve.engine.guard import GuardedEngine
from nanoserve.engine.plan import Plan
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.utils.checks import require


class CpuClock:
    """A clock of the processor time of this process, for measurements on a busy machine.

    It stands while other processes run. An engine in one thread takes the same time by this clock
    as on an idle machine, but for caches that it shares. `wait` passes the time between requests.
    """

    def __init__(self) -> None:
        self._waited = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._waited

    def wait(self, seconds: float) -> None:
        self._waited += seconds


class Measured(NamedTuple):
    """The results of a real run, and the sizes and times of its steps."""

    results: Results
    steps: list[MeasuredStep]


def serve_for_real(
    engine: GuardedEngine, traffic: Traffic, wait: Callable[[float], None] = time.sleep
) -> Measured:
    """Serve all requests of `traffic` at their times. The engine must be idle, and stays open.

    wait: passes seconds of the engine's clock while there is nothing to compute.

    Times of arrival are those at which requests were due, also if a step was under way. Every
    request gets as many tokens as its output has. Raises `ValueError` if the engine is busy.
    """
    require(
        not engine.has_unfinished_requests(), "the engine is busy: finish or abort its requests"
    )
    watch = _Watch(engine)
    engine.observers.append(watch.observe)
    try:
        return watch.serve(deque(traffic.arrivals()), wait)
    finally:
        engine.observers.remove(watch.observe)


class _Watch:
    """An observer that notes steps and token times, and the loop that feeds the engine."""

    def __init__(self, engine: GuardedEngine) -> None:
        self._engine, self._maker = engine, RequestMaker(engine)
        self._sizes, self._times = StepSizes(engine), TokenTimes()
        self._finished, self._before = Finished(), engine.stats

    def observe(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        self._sizes.observe(plan, batch, result, times)
        self._times.note(plan, result, self._engine.clock())

    def serve(self, pending: deque[Arrival], wait: Callable[[float], None]) -> Measured:
        engine, number = self._engine, 0
        start = engine.clock()
        while pending or engine.has_unfinished_requests():
            while pending and start + pending[0].time <= engine.clock():
                arrival = pending.popleft()
                due = start + arrival.time
                engine.add(self._maker.make(str(number), arrival.with_limit(), due))
                number += 1
            if not engine.has_unfinished_requests():
                wait(max(0.0, start + pending[0].time - engine.clock()))
                continue
            for output in engine.step():
                if output.error is not None:
                    raise output.error
                self._finished.add(output)
        seconds = engine.clock() - start
        busy = sum(step.seconds for step in self._sizes.steps)
        stats = self._before, engine.stats
        results = Results.of_engine(self._finished, self._times, *stats, seconds, busy)
        return Measured(results, self._sizes.steps)
