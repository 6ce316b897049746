"""Test of the exercise of chapter 15, against the benchmark and a slow simulation."""

from random import Random

import numpy as np
import pytest

from nanoserve.cli.bench.latency import latencies, poisson_arrivals

from .exercise import compare, goodput, percentile, waits


@pytest.mark.parametrize("count", [1, 2, 5, 64])
@pytest.mark.parametrize("p", [0, 10, 50, 90, 99, 100])
def test_percentiles_are_numpys(count: int, p: float) -> None:
    rng = Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    before = list(values)
    expected = float(np.percentile(values, p))
    assert percentile(values, p) == pytest.approx(expected), f"percentile({before}, {p})"
    assert values == before, "the caller's list must stay as it is"


def tick_by_tick(due: list[int], durations: list[int]) -> list[int]:
    """The same server, simulated one unit of time after the other."""
    found, queue, left, now = [0] * len(due), [], 0, 0
    while 0 in found:
        queue += [i for i, time in enumerate(due) if time == now]
        if queue and left == 0:
            left = durations[queue[0]]
        now += 1
        if left:
            left -= 1
            if left == 0:
                done = queue.pop(0)
                found[done] = now - due[done]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_waiting_counts_from_when_a_request_was_due(seed: int) -> None:
    rng = Random(seed)
    due = sorted(rng.randint(0, 60) for _ in range(12))
    durations = [rng.randint(1, 9) for _ in due]
    found = waits([float(time) for time in due], [float(d) for d in durations])
    case = f"waits({due}, {durations})"
    assert found == tick_by_tick(due, durations), case
    assert all(wait >= d for wait, d in zip(found, durations, strict=True)), case


def test_a_server_that_idles_does_not_start_before_the_request_is_due() -> None:
    assert waits([5.0, 6.0, 100.0], [3.0, 1.0, 2.0]) == [3.0, 3.0, 2.0]


def test_what_hides_behind_one_stall() -> None:
    due = [0.1 * i for i in range(100)]
    durations = [2.0 if i == 50 else 0.01 for i in range(100)]
    case = "due every 0.1 s, 100 times; each takes 0.01 s except number 50, which takes 2 s"
    assert percentile(durations, 90) < 0.02, case
    assert percentile(waits(due, durations), 90) > 1.0, case


@pytest.mark.parametrize("seed", range(10))
def test_goodput_is_the_benchmarks(seed: int) -> None:
    rng, due = Random(seed), poisson_arrivals(5.0, 30, seed)
    token_times = []
    for time in due:
        times = [time + rng.expovariate(4.0)]
        for _ in range(rng.randint(0, 8)):
            times.append(times[-1] + rng.expovariate(20.0))
        token_times.append(times)
    expected = latencies(due, token_times, slo_ttft=0.3, slo_itl=0.05)["goodput"]
    case = f"goodput({due}, {token_times}, 0.3, 0.05)"
    assert goodput(due, token_times, 0.3, 0.05) == pytest.approx(expected), case
    assert expected > 0, case


def test_objectives_that_are_just_met_count() -> None:
    assert goodput([1.0, 1.0], [[1.5, 2.0], [1.75, 4.0]], slo_ttft=0.5, slo_itl=0.5) == 1 / 4


def test_ratios_are_of_pairs_and_pairs_without_a_run_are_left_out() -> None:
    assert compare([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]) == (2.0, 1.0, 3.0)
    # Without pairs it would be 20 / 3.
    assert compare([1.0, None, 10.0], [2.0, 9.0, None]) == (2.0, 2.0, 2.0)
    assert compare([None, 1.0], [1.0, None]) is None
