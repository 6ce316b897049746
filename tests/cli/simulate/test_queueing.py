"""In settings that queueing theory knows, simulated waits are those of its formulas."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from simulated import Listed, make_setup, random_traffic, simulate

from nanoserve.cli.simulate.fleet import Fleet
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival

SERVICE = 0.01  # seconds


class Poisson:
    """Requests that take one step each, as a Poisson process."""

    def __init__(self, load: float, num_requests: int, seed: int) -> None:
        rng, now, self.times = Random(seed), 0.0, []
        for _ in range(num_requests):
            now += rng.expovariate(load / SERVICE)
            self.times.append(now)

    def arrivals(self) -> Iterator[Arrival]:
        for time in self.times:
            yield Arrival(time, [1], [2], max_tokens=1)


def single_server() -> Setup:
    """A queue with one server and a constant service time: one sequence at a time, one step."""
    setup = make_setup(max_num_seqs=1, enable_prefix_caching=False)
    step_time = LinearTime(fixed=SERVICE)
    return Setup(setup.config, setup.model_config, 64, step_time)


def waits_of(traffic: Poisson) -> tuple[np.ndarray, np.ndarray]:
    results, _ = simulate(single_server(), traffic)
    done = results.finished.columns()
    assert (np.diff(done["arrival"]) > 0).all()  # first come, first served
    return done["arrival"], done["first_scheduled"] - done["arrival"]


def test_each_wait_is_lindleys(by_size) -> None:
    """W' = max(0, W + service - time to the next arrival) (Lindley 1952), for every request."""
    traffic = Poisson(0.9, by_size(800, 5000, 20_000), 3)
    _, waits = waits_of(traffic)
    expected = [0.0]
    for this, following in pairwise(traffic.times):
        expected.append(max(0.0, expected[-1] + SERVICE - (following - this)))
    assert waits == pytest.approx(expected, abs=1e-9)
    assert waits.max() > 3 * SERVICE


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_mean_waits_are_those_of_m_d_1(load: float, by_size) -> None:
    """Pollaczek-Khinchine: W = load x service / (2 (1 - load)), at the load that was drawn.

    The mean of 4,000 correlated waits is known to about 4 %, that of 200,000 to less than 1 %.
    """
    arrivals, waits = waits_of(Poisson(load, by_size(4_000, 30_000, 200_000), 0))
    drawn = SERVICE * (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])
    expected = drawn * SERVICE / (2 * (1 - drawn))
    assert waits.mean() == pytest.approx(expected, rel=by_size(0.08, 0.04, 0.02))


class Watched:
    """Traffic that looks at the engine each time a request has arrived."""

    def __init__(self, traffic: Listed) -> None:
        self._traffic, self.fleet, self.seen = traffic, None, []

    def arrivals(self) -> Iterator[Arrival]:
        for arrival in self._traffic.arrivals():
            yield arrival
            engine = self.fleet.replicas["0"].engine
            self.seen.append((self.fleet.clock(), len(engine.output_processor.requests)))


def test_littles_law_holds_for_a_batching_engine(by_size) -> None:
    """Poisson arrivals see time averages: rate x mean time in the system."""
    setup = make_setup(150, max_num_seqs=6)
    traffic = Watched(random_traffic(5, num_requests=by_size(1500, 6000, 30_000), rate=9.0))
    traffic.fleet = Fleet(setup)
    results = traffic.fleet.run(traffic)
    done = results.finished.columns()
    times, numbers = np.array(traffic.seen).T
    # A step that is under way when a request arrives has taken out what it finishes.
    starts = np.searchsorted(np.sort(done["end"]), times, side="right")
    in_system = np.arange(1, len(times) + 1) - starts
    assert (numbers <= in_system).all() and (in_system - numbers).max() <= 6
    rate = len(times) / results.seconds
    mean_time = float((done["end"] - done["arrival"]).mean())
    assert in_system.mean() - 1 == pytest.approx(rate * mean_time, rel=0.02)
    assert in_system.max() > 8
