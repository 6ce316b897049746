"""nanoserve/cli/bench/latency.py: when requests come, and what counts as their waiting."""

import numpy as np
import pytest

from nanoserve.cli.bench.latency import latencies, poisson_arrivals, serve


class Clock:
    """In the place of `time`: it stands still unless somebody sleeps, however busy the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("nanoserve.cli.bench.latency.time", clock)
    return clock


class Slow:
    """Takes `seconds` for a step, in which every request gets a token."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds, self.left, self.polls = clock, seconds, {}, 0

    def add(self, index: int, prompt: list[int], output_len: int) -> None:
        self.left[index] = (prompt[0], output_len)

    def poll(self, seconds: float) -> list[tuple[int, list[int]]]:
        assert self.left, "polled without a request"
        self.polls += 1
        self.clock.sleep(self.seconds)
        new = [(index, [token]) for index, (token, _) in self.left.items()]
        self.left = {i: (token, n - 1) for i, (token, n) in self.left.items() if n > 1}
        return new


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps are exponential: their mean and their standard deviation are both 1 / rate."""
    arrivals = np.array(poisson_arrivals(5.0, 20_000))
    gaps = np.diff(arrivals, prepend=0.0)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 5, rel=0.03)
    # Nor does a gap tell anything of the next one.
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_another_rate_stretches_the_same_pattern() -> None:
    slow, fast = poisson_arrivals(2.0, 50), poisson_arrivals(8.0, 50)
    assert slow == pytest.approx([4 * arrival for arrival in fast])
    assert poisson_arrivals(2.0, 50, seed=1) != slow


def test_a_request_that_comes_in_the_middle_of_a_step_has_waited_since(clock: Clock) -> None:
    """Not since the engine took it: its step took 0.3 s, of which the request saw half."""
    engine, arrivals = Slow(clock, 0.3), [0.0, 0.15]
    outputs, token_times = serve(engine, [[5], [6]], [1, 1], arrivals)
    assert outputs == [[5], [6]]
    found = latencies(arrivals, token_times, slo_ttft=0.44, slo_itl=1)
    assert token_times[1][0] >= 0.6
    assert found["ttft_p99"] >= 445
    assert found["goodput"] == pytest.approx(found["request_rate"] / 2)


def test_an_idle_engine_is_not_driven(clock: Clock) -> None:
    engine = Slow(clock, 0.001)
    outputs, token_times = serve(engine, [[5], [6]], [3, 2], [0.0, 0.4])
    assert outputs == [[5, 5, 5], [6, 6]]
    assert engine.polls == 5
    assert token_times[0][-1] < 0.4 <= token_times[1][0]


def test_an_engine_that_goes_on_is_stopped(clock: Clock) -> None:
    engine = Slow(clock, 0.001)
    engine.add = lambda index, prompt, output_len: Slow.add(engine, index, prompt, 9)
    with pytest.raises(RuntimeError, match="request 0 got more tokens than 1"):
        serve(engine, [[5], [6]], [1, 2], [0.0, 0.0])


def test_percentiles_goodput_and_rate() -> None:
    arrivals = [0.0, 1.0, 2.0]
    token_times = [[0.1, 0.2, 0.4], [1.3], [2.2, 2.9, 4.0]]
    found = latencies(arrivals, token_times, slo_ttft=0.25, slo_itl=0.5)
    assert found["ttft_p50"] == pytest.approx(200)
    assert found["ttft_p90"] == pytest.approx(280)  # between 200 and 300 ms
    assert found["itl_p50"] == pytest.approx(450)  # gaps of 100, 200, 700 and 1100 ms
    assert found["itl_p99"] == pytest.approx(1088)
    assert found["request_rate"] == pytest.approx(3 / 4)
    # The second misses the first objective, the third, with 900 ms a token, the other one.
    assert found["goodput"] == pytest.approx(1 / 4)
