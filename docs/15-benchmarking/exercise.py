"""Exercise: percentiles, waiting times, goodput and ratios of runs.

Complete four functions, in plain Python.

`percentile` sorts the values, numbered from 0. The p-th percentile is at position (n - 1) p / 100;
between two positions it is interpolated linearly between their values.

`waits` computes the latency of a server that answers one request after the other, in the order in
which they were due. `due` has the times (in order) at which requests were due, `durations` how long
the server works on each. The result is the time from when each request was due until it was
answered. An idle server waits for the next request.

`goodput` is the number of requests per second, from time 0 to the last token of all, that met two
objectives: the first token within `slo_ttft` seconds of when the request was due, and the mean time
between its tokens at most `slo_itl`. With one token there is no time between tokens. `token_times`
has the times of each request's tokens.

`compare` takes the seconds of alternating runs of two engines: ours[0], theirs[0], ours[1] and
so on. A failed run is None, and a pair with such a run is ignored. The result is the median, the
smallest and the largest of the ratios theirs / ours, or None if no pair is left.

    pytest -x docs/15-benchmarking/test_exercise.py
"""


def percentile(values: list[float], p: float) -> float:
    """The p-th percentile of at least one value; `values` need not be in order."""
    raise NotImplementedError


def waits(due: list[float], durations: list[float]) -> list[float]:
    """Seconds from when each request was due to its answer."""
    raise NotImplementedError


def goodput(
    due: list[float], token_times: list[list[float]], slo_ttft: float, slo_itl: float
) -> float:
    """Requests per second that met both objectives."""
    raise NotImplementedError


def compare(
    ours: list[float | None], theirs: list[float | None]
) -> tuple[float, float, float] | None:
    """Median, smallest and largest ratio of the pairs."""
    raise NotImplementedError
