"""The exercise of chapter 28 against formulas, single steps, and the engine's own simulator."""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

import pytest

from nanoserve.cli.simulate.fleet import Fleet
from nanoserve.cli.simulate.models import model_config_of
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival
from nanoserve.config import EngineConfig

from .exercise import Request, fit, in_system, serve, waits


def poisson(rate: float, number: int, seed: int) -> list[float]:
    rng, now, times = Random(seed), 0.0, []
    for _ in range(number):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def md1(load: float, service: float) -> float:
    return load * service / (2 * (1 - load))


# ---------------------------------------------------------------- queues


def test_waits_by_hand() -> None:
    found = waits([0.0, 1.0, 2.0, 20.0, 21.0], 4.0)
    assert found == pytest.approx([0, 3, 6, 0, 3]), f"arrivals 0, 1, 2, 20, 21; 4 s each: {found}"


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_waits_are_those_of_the_formula(load: float) -> None:
    arrivals = poisson(load / 0.01, 200_000, 7)
    drawn = 0.01 * (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
    found = waits(arrivals, 0.01)
    assert sum(found) / len(found) == pytest.approx(md1(drawn, 0.01), rel=0.03), f"{load=}"


def test_requests_are_counted_over_time() -> None:
    # One for 1 s, two for 2 s, one for 1 s, none for 4 s, one for 2 s.
    found = in_system([0.0, 1.0, 8.0], [4.0, 3.0, 10.0])
    assert found == pytest.approx(8 / 10), f"0 to 4, 1 to 3 and 8 to 10: {found}"


def test_littles_law() -> None:
    arrivals = poisson(80.0, 5000, 3)
    ends = [time + wait + 0.01 for time, wait in zip(arrivals, waits(arrivals, 0.01), strict=True)]
    rate = len(arrivals) / (ends[-1] - arrivals[0])
    mean_time = sum(ends) / len(ends) - sum(arrivals) / len(arrivals)
    assert in_system(arrivals, ends) == pytest.approx(rate * mean_time)


# ---------------------------------------------------------------- the engine


class Counted:
    """10 ms, and 1 ms for each token; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, num_tokens: int) -> float:
        self.asked.append(num_tokens)
        return 0.01 + 0.001 * num_tokens


def test_three_requests_by_hand() -> None:
    requests = [Request(0.0, 5, 3), Request(0.007, 4, 2), Request(0.08, 3, 1)]
    found = [[1000 * time for time in times] for times in serve(requests, 8, Counted())]
    assert found[0] == pytest.approx([15, 42]), "A: steps end at 15, 30 and 42 ms"
    assert found[1] == pytest.approx([30, 42]), "B arrives in A's first step"
    assert found[2] == pytest.approx([93, 93]), "C finds an idle engine at 80 ms"


def test_a_request_waits_for_a_slot() -> None:
    requests = [Request(0.0, 1, 3), Request(0.0, 1, 2), Request(0.001, 1, 1)]
    times = serve(requests, 2, lambda num_tokens: 1.0)
    assert [*map(tuple, times)] == [(1, 3), (1, 2), (3, 3)], "the second slot is free at 2 s"


class Listed:
    """The same requests for the engine's own simulator."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def arrivals(self) -> Iterator[Arrival]:
        for request in self._requests:
            output = [2] * request.output
            yield Arrival(request.arrival, [1] * request.prompt, output, request.output)


def by_nanoserve(requests: Sequence[Request], num_slots: int) -> list[tuple[float, float]]:
    options = {"async_scheduling": False, "enable_prefix_caching": False, "max_model_len": 1000}
    config = EngineConfig("tiny", max_num_seqs=num_slots, **options).for_device("cpu")
    step_time = LinearTime(fixed=0.01, per_token=0.001)
    setup = Setup(config, model_config_of("tiny"), 2000, step_time)
    done = Fleet(setup).run(Listed(requests)).finished.columns()
    rows = zip(done["request"], done["first_token"], done["end"], strict=True)
    return [(first, end) for _, first, end in sorted(rows)]


@pytest.mark.parametrize(("num_slots", "rate", "seed"), [(1, 1.0, 0), (3, 4.0, 1), (12, 12.0, 2)])
def test_the_times_are_those_of_nanoserve(num_slots: int, rate: float, seed: int) -> None:
    rng = Random(seed)
    requests = [
        Request(time, rng.randint(1, 40), rng.randint(1, 60)) for time in poisson(rate, 120, seed)
    ]
    found, expected = serve(requests, num_slots, Counted()), by_nanoserve(requests, num_slots)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        told = f"request {number} of {num_slots=}, {rate=}: {requests[number]}"
        assert tuple(ours) == pytest.approx(theirs, abs=1e-6), told


def test_decode_steps_are_leapt_over() -> None:
    seconds = Counted()
    requests = [Request(0.0, 10, 100_000), Request(50.0, 10, 7), Request(60.0, 10, 500)]
    found = serve(requests, 4, seconds)
    assert len(seconds.asked) <= 12, f"seconds() was called {len(seconds.asked)} times"
    assert found[0].end > 1100 and found[1].first_token == pytest.approx(50, abs=0.05)


def test_one_slot_and_one_token_are_the_queue_of_the_formula() -> None:
    arrivals = poisson(60.0, 3000, 5)
    found = serve([Request(time, 1, 1) for time in arrivals], 1, lambda num_tokens: 0.01)
    mine = [times.end - 0.01 - time for times, time in zip(found, arrivals, strict=True)]
    assert mine == pytest.approx(waits(arrivals, 0.01), abs=1e-9)


# ---------------------------------------------------------------- step times


def error(fixed: float, per_token: float, steps: list[tuple[int, float]]) -> float:
    return sum(((fixed + per_token * n) / seconds - 1) ** 2 for n, seconds in steps)


@pytest.mark.parametrize(
    "steps",
    [
        [(1, 0.012), (100, 0.11), (50, 0.06), (8, 0.018)],
        [(200, 3.8), (400, 8.1), (800, 17.0)],  # an ordinary fit has a negative fixed time
        [(1, 0.02), (10, 0.019), (100, 0.018)],  # and here fewer seconds for more tokens
    ],
)
def test_no_other_coefficients_fit_better(steps: list[tuple[int, float]]) -> None:
    tokens, measured = zip(*steps, strict=True)
    found = fit(tokens, measured)
    assert min(found) >= 0, f"{steps}: {found}"
    least = error(*found, steps)
    size = max(measured)
    for a, b in product((-0.1, -0.01, 0.0, 0.01, 0.1), repeat=2):
        other = max(0.0, found[0] + a * size), max(0.0, found[1] + b * size / max(tokens))
        assert least <= error(*other, steps) + 1e-12, f"{steps}: {other} is better than {found}"


def test_a_fit_finds_what_the_steps_were_made_from() -> None:
    rng = Random(1)
    tokens = [rng.choice([1, 2, 8, 64, 300]) for _ in range(400)]
    measured = [(0.004 + 2e-5 * n) * rng.uniform(0.98, 1.02) for n in tokens]
    assert fit(tokens, measured) == pytest.approx((0.004, 2e-5), rel=0.02)
