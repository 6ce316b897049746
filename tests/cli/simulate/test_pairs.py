"""Prefill and decode on different replicas."""

from dataclasses import replace

import numpy as np
import pytest
from simulated import Listed, make_setup, random_traffic, simulate

from nanoserve.cli.simulate.pairs import PairSettings, simulate_pairs
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.sessions import Sessions
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival

TIME = LinearTime(fixed=0.01, per_token=0.001)
TOKEN_BYTES = 2 * 6 * 2 * 32 * 2  # K and V, layers, heads, dim, 16 bits


def test_the_times_of_one_request() -> None:
    """A prompt of 100 tokens, its transfer, and a step of one row for each further token."""
    setup = replace(make_setup(), step_time=TIME)
    traffic = Listed([Arrival(1.0, list(range(100)), [5] * 21, 21)])
    bandwidth = 100 * TOKEN_BYTES / 0.5  # half a second for this prompt
    found = simulate_pairs(setup, traffic, PairSettings(1, 1, bandwidth))
    assert found.ttft[0] == pytest.approx(0.01 + 0.1)
    # The first step on the decode replica has the prompt's row: its time is that of one token.
    assert found.tpot[0] == pytest.approx((0.5 + 20 * 0.011) / 20)
    assert found.ends[0] == pytest.approx(1.0 + 0.11 + 0.5 + 20 * 0.011)


def test_long_prompts_do_not_delay_tokens() -> None:
    rng = np.random.default_rng(0)
    arrivals = [
        Arrival(float(t), rng.integers(0, 2000, 700).tolist(), [5] * 40, 40)
        for t in np.cumsum(rng.exponential(0.8, 60))
    ]
    setup = replace(make_setup(3000), step_time=TIME)
    together, _ = simulate(setup, Listed(arrivals), num_replicas=2)
    apart = simulate_pairs(setup, Listed(arrivals), PairSettings(1, 1, 1e12))
    goal = Goal(5.0, 0.05)
    # Beside prompts, tokens of others take a step of 0.7 s; apart, none does.
    assert goal.summary(together)["tpot_p99"] > 30 and apart.summary(goal)["tpot_p99"] < 15
    assert apart.summary(goal)["ttft_p50"] > goal.summary(together)["ttft_p50"]
    assert apart.summary(goal)["attainment"] == 1.0
    assert apart.decode.stats.num_output_tokens == 60 * 39


def test_requests_keep_their_order_through_both_pools() -> None:
    """Whatever the order in which they end: times of the same request are compared."""
    traffic = random_traffic(3, num_requests=80, rate=30.0)
    found = simulate_pairs(
        replace(make_setup(2000), step_time=TIME), traffic, PairSettings(2, 2, 1e7)
    )
    assert len(found.ttft) == 80 and (found.ttft > 0).all() and (found.tpot >= 0).all()
    single = np.array([len(a.output) == 1 for a in traffic.arrivals()])
    assert (found.tpot[single] == 0).all() and (found.tpot[~single] >= 0.011 - 1e-9).all()


def test_pairs_are_checked() -> None:
    with pytest.raises(ValueError, match="num_decode=0 must be"):
        PairSettings(1, 0, 1e9)
    with pytest.raises(ValueError, match="bandwidth=0 must be"):
        PairSettings(1, 1, 0)
    setup = make_setup()
    with pytest.raises(ValueError, match="sessions wait for answers"):
        simulate_pairs(setup, Sessions("chat", 1.0, 5.0, 2047), PairSettings(1, 1, 1e9))
    with pytest.raises(ValueError, match="there are no requests"):
        simulate_pairs(setup, Listed([]), PairSettings(1, 1, 1e9))
