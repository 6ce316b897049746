"""Solution: percentiles, waiting times, goodput and ratios of runs."""

import math
import statistics


def percentile(values: list[float], p: float) -> float:
    """The p-th percentile of at least one value; `values` need not be in order."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * p / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def waits(due: list[float], durations: list[float]) -> list[float]:
    """Seconds from when each request was due to its answer."""
    free_at, found = 0.0, []
    for time, duration in zip(due, durations, strict=True):
        free_at = max(free_at, time) + duration
        found.append(free_at - time)
    return found


def goodput(
    due: list[float], token_times: list[list[float]], slo_ttft: float, slo_itl: float
) -> float:
    """Requests per second that met both objectives."""
    met = 0
    for time, times in zip(due, token_times, strict=True):
        gap = (times[-1] - times[0]) / max(1, len(times) - 1)
        met += times[0] - time <= slo_ttft and gap <= slo_itl
    return met / max(times[-1] for times in token_times)


def compare(
    ours: list[float | None], theirs: list[float | None]
) -> tuple[float, float, float] | None:
    """Median, smallest and largest ratio of the pairs."""
    pairs = zip(ours, theirs, strict=True)
    ratios = [b / a for a, b in pairs if a is not None and b is not None]
    return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None
