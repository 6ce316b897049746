"""Where the time of a step goes, for those who watch it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class StepTimes:
    """Seconds that the loop spent on one step, in each of its parts.

    execute: launching and waiting; with a step ahead, the rest of it passes unseen behind the
        other parts of the step before.
    """

    schedule: float = 0.0
    pack: float = 0.0
    execute: float = 0.0
    update: float = 0.0


class Stopwatch:
    """Time never counts twice: each lap begins where the one before it ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        self._lap_start = self._clock()

    def lap(self, times: StepTimes, part: str) -> float:
        """Add what has passed to `part` of a step's times; returns the time."""
        now = self._clock()
        setattr(times, part, getattr(times, part) + now - self._lap_start)
        self._lap_start = now
        return now
