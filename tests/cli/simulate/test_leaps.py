"""Leaps end in the state that single steps end in, to the bit."""

from random import Random
from typing import Any

import pytest
from simulated import TIME, Listed, make_setup, random_traffic, simulate

from nanoserve.cli.simulate.fleet import Fleet
from nanoserve.cli.simulate.results import Results
from nanoserve.cli.simulate.traffic import Arrival
from nanoserve.engine.extension import Extension
from nanoserve.engine.scheduler import Scheduler

COUNTED = ("num_steps", "num_computed_tokens", "num_preemptions", "prefix_cache_hits")


def state_of(fleet: Fleet) -> dict[str, Any]:
    """The blocks of the pool in the order in which they will be reused, and the cached prefixes."""
    manager = fleet.replicas["0"].engine.scheduler.block_manager
    cache = manager.prefix_cache
    return {
        "free": list(manager._free),
        "cached": {hash_: cache._prefixes[hash_].blocks for hash_ in cache._prefixes},
        "numbers": cache._numbers,
    }


def as_values(results: Results) -> dict[str, Any]:
    columns = {name: list(values) for name, values in vars(results.finished).items()}
    return columns | {name: getattr(results.stats, name) for name in COUNTED} | results.summary()


def leapt_steps(fleet: Fleet) -> int:
    return sum(replica._num_leapt_steps for replica in fleet.replicas.values())


@pytest.mark.parametrize("seed", range(16))
def test_leaps_equal_steps(seed: int) -> None:
    rng = Random(seed)
    options = {
        "num_kv_blocks": rng.choice([70, 150, 1000]),
        "block_size": rng.choice([1, 4, 16]),
        "max_num_seqs": rng.choice([2, 6, 64]),
        "max_num_batched_tokens": rng.choice([64, 2048]),
        "enable_prefix_caching": rng.random() < 0.7,
        "max_model_len": 70 if rng.random() < 0.2 else None,
    }
    if options["block_size"] < 16:
        options["num_kv_blocks"] *= 16 // options["block_size"]
    traffic = random_traffic(seed, rate=rng.choice([2, 20, 500]))
    if options["max_model_len"] is not None:
        traffic = Listed([Arrival(a.time, a.prompt[:50], a.output) for a in traffic.arrivals()])
    results, fleets = zip(
        *(simulate(make_setup(leaps=leaps, **options), traffic) for leaps in (True, False)),
        strict=True,
    )
    assert as_values(results[0]) == as_values(results[1])
    assert state_of(fleets[0]) == state_of(fleets[1])
    assert results[0].waited_for == pytest.approx(results[1].waited_for)
    fleets[0].replicas["0"].engine.scheduler.check()
    assert leapt_steps(fleets[1]) == 0


def test_most_steps_are_leapt_and_some_preempt() -> None:
    """Otherwise the equality above would say little."""
    results, fleet = simulate(make_setup(), random_traffic(0, rate=2))
    assert leapt_steps(fleet) > 0.6 * results.stats.num_steps
    results, fleet = simulate(make_setup(70), random_traffic(1, rate=50))
    assert results.stats.num_preemptions > 3 and leapt_steps(fleet) > 50
    assert results.stats.prefix_cache_hits > 300


def test_a_request_that_arrives_during_a_leap_has_not_waited_for_a_slot() -> None:
    traffic = Listed([Arrival(0.0, [1] * 10, [2] * 200), Arrival(0.5, [3] * 10, [4] * 10)])
    results, fleet = simulate(make_setup(), traffic)
    assert leapt_steps(fleet) > 100
    assert results.waited_for == {"max_num_seqs": 0, "max_num_batched_tokens": 0, "KV blocks": 0}


def test_an_arrival_cuts_a_leap_short() -> None:
    """The step under way ends first; the next one has the new request."""
    arrivals = [Arrival(0.0, [1, 2, 3], [5] * 200, 200), Arrival(0.5, [4, 5], [6] * 3, 3)]
    results, _ = simulate(make_setup(), Listed(arrivals))
    order = results.finished.end.index(min(results.finished.end))
    scheduled = results.finished.first_scheduled[order]
    step = TIME.fixed + TIME.per_token + TIME.per_row + TIME.per_sampled
    assert 0.5 <= scheduled <= 0.5 + 1.02 * step  # context adds a little


class Counts(Extension):
    """An extension that wants to see every step."""

    def __init__(self, engine: object) -> None:
        self.num_steps = 0

    def on_step_start(self) -> None:
        self.num_steps += 1


class LastFirst(Scheduler):
    def order(self, seq: Any) -> tuple[int, ...]:
        return (-seq.arrival,)


class Planner(Scheduler):
    def schedule(self) -> Any:
        return super().schedule()


@pytest.mark.parametrize(("policy", "leaps"), [(LastFirst, True), (Planner, False), (None, True)])
def test_a_policy_that_plans_itself_sees_each_step(policy: Any, leaps: bool) -> None:
    _, fleet = simulate(make_setup(scheduler_cls=policy), random_traffic(0, rate=2))
    assert (leapt_steps(fleet) > 0) == leaps


def test_an_extension_sees_each_step() -> None:
    from dataclasses import replace

    setup = replace(make_setup(), extensions=(Counts,))
    results, fleet = simulate(setup, random_traffic(0, rate=2))
    (extension,) = fleet.replicas["0"].engine.extensions
    assert extension.num_steps == results.stats.num_steps > 1000
