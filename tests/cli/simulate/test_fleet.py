"""Simulated replicas behind the router of real ones."""

import json
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from simulated import TIME, VOCAB_SIZE, Listed, make_setup, random_traffic, simulate

from nanoserve.cli.simulate.fleet import Failure, Fleet, FleetSettings
from nanoserve.cli.simulate.traffic import Arrival
from nanoserve.config import EngineConfig
from nanoserve.serve.replicas.routing import Placement


def conversations(num: int = 24, turns: int = 5, seed: int = 0) -> Listed:
    """Conversations of their own prefixes; a turn repeats what was said before."""
    rng, arrivals = random.Random(seed), []
    for _ in range(num):
        now, history = rng.uniform(0, 2), rng.choices(range(VOCAB_SIZE), k=150)
        for _ in range(turns):
            output = rng.choices(range(VOCAB_SIZE), k=30)
            arrivals.append(Arrival(now, history, output, 30))
            history = [*history, *output, *rng.choices(range(VOCAB_SIZE), k=20)]
            now += rng.uniform(1.0, 2.0)
    return Listed(arrivals)


def placed(fleet: Fleet) -> list[int]:
    return [replica.stats.num_steps for replica in fleet.replicas.values()]


@pytest.mark.parametrize("router", ["approximate", "exact"])
def test_the_router_sends_turns_to_their_cache(router: str) -> None:
    setup = make_setup(2000, max_num_seqs=8)
    results, fleet = simulate(setup, conversations(), num_replicas=4, router=router)
    assert len(results.finished) == 120 and min(placed(fleet)) > 100
    alone, _ = simulate(setup, conversations())
    # One engine has every prefix; four have most of them.
    assert results.stats.prefix_cache_hits > 0.9 * alone.stats.prefix_cache_hits > 1000
    assert results.summary()["ttft_p99"] < alone.summary()["ttft_p99"]


def test_runs_are_equal_in_other_processes() -> None:
    """Neither hashes of strings, nor sets, nor the clock of the machine have a part in it."""
    script = (
        "import json, sys; sys.path.insert(0, 'tests/support')\n"
        "from simulated import *\n"
        "results, _ = simulate(make_setup(90), random_traffic(3), num_replicas=3, router='exact',\n"
        "    speeds={1: 0.5})\n"
        "print(json.dumps([results.summary(), results.counts(), list(results.finished.end)]))"
    )
    outputs = set()
    for seed in ("1", "2"):
        command = [sys.executable, "-c", script]
        run = subprocess.run(command, capture_output=True, text=True, env=_with(seed), check=True)
        outputs.add(run.stdout)
    assert len(outputs) == 1
    results, _ = simulate(
        make_setup(90), random_traffic(3), num_replicas=3, router="exact", speeds={1: 0.5}
    )
    summary, counts, ends = json.loads(outputs.pop())
    assert (summary, counts) == (results.summary(), results.counts())
    assert ends == list(results.finished.end)


def _with(hash_seed: str) -> dict[str, str]:
    import os

    return os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."}


def test_the_rng_of_a_placement_breaks_ties() -> None:
    config = EngineConfig("none", prefix_cache_seed=1)

    def choices(seed: int) -> list[str]:
        chosen = []
        for _ in range(20):
            placement = Placement(config, random.Random(seed + len(chosen)))
            for name in "abcd":
                placement.join(name, 10)
            chosen.append(placement._router.choose([], 10, dict.fromkeys("abcd", 0)))
        return chosen

    assert choices(0) == choices(0) and len({*choices(0)}) > 1


def test_a_slow_replica_gets_less() -> None:
    traffic = random_traffic(1, num_requests=300, rate=60.0)
    _, fleet = simulate(make_setup(2000), traffic, num_replicas=3, speeds={2: 0.25})
    tokens = [replica.stats.num_computed_tokens for replica in fleet.replicas.values()]
    assert tokens[2] < 0.7 * min(tokens[:2])


def test_without_a_router_first_come_first_served_is_never_later_when_faster() -> None:
    for seed in range(5):
        traffic = random_traffic(seed)
        ends = []
        for speed in (1.0, 1.3, 4.0):
            results, _ = simulate(make_setup(max_num_seqs=1), traffic, speeds={0: speed})
            ends.append(list(results.finished.end))
        for slower, faster in pairwise(ends):
            assert all(a >= b for a, b in zip(slower, faster, strict=True))


@pytest.mark.parametrize("leaps", [True, False])
def test_requests_of_a_failed_replica_are_sent_to_another(leaps: bool) -> None:
    traffic = random_traffic(2, num_requests=200, rate=30.0)
    failure = Failure(1.5, 0, 2.0)
    setup = make_setup(2000, leaps, max_num_seqs=4)
    results, fleet = simulate(setup, traffic, num_replicas=2, failures=(failure,))
    # Those that had output fail, as their clients have got the beginning; all others end.
    assert len(results.finished) + results.num_failed == 200
    assert 0 < results.num_failed <= 4
    calm, _ = simulate(setup, traffic, num_replicas=2)
    assert calm.num_failed == 0
    assert results.summary()["ttft_p99"] > calm.summary()["ttft_p99"]
    assert fleet.replicas["0"].stats.num_steps > 50  # it is back
    assert {*fleet.replicas} == {"0", "1"}


def test_requests_wait_while_no_replica_is_there() -> None:
    traffic = Listed([Arrival(0.5 + i, [1, 2, 3], [4] * 5, 5) for i in range(3)])
    results, _ = simulate(make_setup(), traffic, failures=(Failure(0.2, 0, 5.0),))
    assert len(results.finished) == 3 and min(results.finished.first_token) > 5.2


def test_an_exact_router_knows_what_was_evicted() -> None:
    """With small pools, prompts that were sent are often not cached any more."""
    for router in ("approximate", "exact"):
        _, fleet = simulate(make_setup(120), conversations(), num_replicas=3, router=router)
        known = fleet._placement._router._known
        is_right = []
        for name, replica in fleet.replicas.items():
            cache = replica.engine.scheduler.block_manager.prefix_cache
            is_right.append({*known[name].blocks} == {*cache.hashes()})
        assert all(is_right) if router == "exact" else not any(is_right)


def test_reports_of_every_step_equal_single_steps() -> None:
    traffic = conversations(num=12)
    rows = [
        simulate(make_setup(leaps=leaps), traffic, num_replicas=3, report_interval=interval)[0]
        for leaps, interval in ((False, 0.25), (True, 0.0))
    ]
    assert rows[0].summary() == rows[1].summary()
    # With rarer reports only the router's choices differ, and little.
    late = simulate(make_setup(), traffic, num_replicas=3, report_interval=0.25)[0]
    assert late.summary()["ttft_p50"] == pytest.approx(rows[0].summary()["ttft_p50"], rel=0.1)


def test_a_run_ends_with_its_last_request() -> None:
    """And not with a leap that an arrival has cut short."""
    arrivals = [Arrival(0.0, [1, 2, 3], [5] * 300), Arrival(0.1, [4, 5], [6] * 3, 3)]
    results, _ = simulate(make_setup(), Listed(arrivals))
    assert results.seconds == max(results.finished.end)
    assert results.summary()["request_rate"] == pytest.approx(2 / results.seconds)


def test_async_scheduling_runs_ahead() -> None:
    """Steps are launched while others run, so that an arrival waits for one step more."""
    traffic = random_traffic(6, num_requests=50, rate=4.0)
    rows = {}
    for is_ahead in (False, True):
        setup = make_setup(2000, async_scheduling=is_ahead)
        results, fleet = simulate(setup, traffic)
        fleet.replicas["0"].engine.scheduler.check()
        assert len(results.finished) == 50
        rows[is_ahead] = results
    assert rows[True].stats.num_output_tokens == rows[False].stats.num_output_tokens
    sync, ahead = rows[False].summary(), rows[True].summary()
    assert ahead["itl_p50"] == pytest.approx(sync["itl_p50"], rel=0.02)
    step = TIME.fixed * 1000
    assert 0.3 * step < ahead["ttft_mean"] - sync["ttft_mean"] < 2 * step


def test_until_ends_a_run_early() -> None:
    fleet = Fleet(make_setup())
    results = fleet.run(random_traffic(0, rate=2.0), until=10.0)
    assert 5 < len(results.finished) < 40 and results.seconds == 10.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_replicas": 0}, r"num_replicas=0 must be an integer >= 1"),
        ({"router": "random"}, r"router='random' is not one of"),
        ({"speeds": {1: 1.0}}, r"replica=1 must be an integer in \[0, 0\]"),
        ({"speeds": {0: 0.0}}, r"speed of replica 0=0.0 must be"),
        ({"failures": (Failure(-1.0, 0, 1.0),)}, r"time of a failure=-1.0 must be"),
        ({"failures": (Failure(1.0, 3, 1.0),)}, r"replica=3 must be an integer in \[0, 0\]"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FleetSettings(**settings)


def test_prompts_are_checked() -> None:
    for prompt, message in (
        ([1] * 1000, "has 1000 tokens; max_model_len=1000 leaves room for 1 to 999"),
        ([1, 2047], r"token ids of 1 to 2047: they must be in \[0, 2047\)"),
        ([], "has 0 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(make_setup(), Listed([Arrival(0.0, prompt, [1], 1)]))
    with pytest.raises(ValueError, match="need a prefix_cache_seed"):
        simulate(make_setup(prefix_cache_seed=None), random_traffic(0), num_replicas=2)


def test_priorities_and_tenants_reach_the_scheduler() -> None:
    prompt = list(range(64))
    arrivals = [Arrival(0.0, prompt, [1] * 200, 200)]
    arrivals += [Arrival(1.0 + i, prompt, [1], 1, tenant=str(i)) for i in range(2)]
    arrivals += [Arrival(3.0, prompt, [1], 1)]
    results, _ = simulate(make_setup(), Listed(arrivals))
    assert results.stats.prefix_cache_hits == 48  # the last one shares with the first
    setup = make_setup(max_num_seqs=1, scheduling_policy="priority", enable_prefix_caching=False)
    arrivals = [Arrival(0.01 * i, prompt, [1] * 50, 50, priority=9 - i) for i in range(9)]
    results, _ = simulate(setup, Listed(arrivals))
    order = sorted(range(9), key=list(results.finished.end).__getitem__)
    by_arrival = [round(100 * results.finished.arrival[i]) for i in order]
    assert by_arrival[0] == 0 and by_arrival[1:] == sorted(by_arrival[1:], reverse=True)


def test_summaries_count_values_as_often_as_they_occurred() -> None:
    """Against percentiles of the values one by one, from a run whose steps are all computed."""
    import numpy as np

    traffic = random_traffic(4, num_requests=20, rate=3.0)
    results, _ = simulate(make_setup(), traffic)
    times = results.token_times[0]
    values = np.repeat(np.asarray(times.seconds), np.asarray(times.counts))
    summary = results.summary()
    for percentile in (50, 90, 99):
        expected = 1000 * np.percentile(values, percentile)
        assert summary[f"itl_p{percentile}"] == pytest.approx(expected)
    assert summary["itl_mean"] == pytest.approx(1000 * values.mean())
    intervals = results.stats.num_output_tokens - len(results.finished)
    assert len(values) == intervals
    assert Counter(times.counts)[1] > 0
    with pytest.raises(ValueError, match="no request that arrived after 0 s"):
        Fleet(make_setup()).run(Listed([])).summary()
