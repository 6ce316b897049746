"""A stopwatch that measures how long each part of a step takes."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class StepTimes:
    """Seconds that the loop spent on each part of one step.

    execute: launching and waiting; with async scheduling, the device works on the step while the
        loop is in other parts, and that time is not included.
    """

    schedule: float = 0.0
    pack: float = 0.0
    execute: float = 0.0
    update: float = 0.0


class Stopwatch:
    """Measures consecutive laps: each begins where the previous one ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start()

    def start(self) -> None:
        self._lap_start = self._clock()

    def lap(self, times: StepTimes, part: str) -> float:
        """Add the time since the last lap to `part` of a step's times; returns the current time."""
        now = self._clock()
        setattr(times, part, getattr(times, part) + now - self._lap_start)
        self._lap_start = now
        return now
