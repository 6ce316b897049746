"""Find the best engine options for given requests, by successive halving.

All candidates run the first few requests; the better third of them runs three times as many, and so
on, until the last few have run all requests (Jamieson and Talwalkar 2016). So the work is spent on
candidates that are hard to distinguish, and bad ones cost little.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from nanoserve.cli.simulate.fleet import Fleet, FleetSettings
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.traffic import Arrival, Traffic
from nanoserve.utils.checks import check_int, require

_KEPT = 3  # of so many candidates, one is kept
_FEWEST_REQUESTS = 16  # of the first round
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """The summary of one candidate, which ran `num_requests` requests."""

    options: Options
    summary: dict[str, Any]
    num_requests: int

    def describe(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items()) or "default"


@dataclass(frozen=True)
class FirstOf:
    """The first requests of other traffic."""

    traffic: Traffic
    number: int

    def arrivals(self) -> Iterator[Arrival]:
        return islice(iter(self.traffic.arrivals()), self.number)


def candidates_of(grid: Mapping[str, AbstractSequence[Any]]) -> list[Options]:
    """Return all combinations of the values of a grid."""
    require(bool(grid), "the grid is empty: name an option with its values")
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def with_options(setup: Setup, options: Options) -> Setup:
    """Return a setup with other engine options, and a KV cache of the same number of tokens.

    Raises `ValueError` for options that the engine rejects.
    """
    options = dict(options)
    if "max_num_seqs" in options and "max_num_batched_tokens" not in options:
        budget = max(setup.config.max_num_batched_tokens, options["max_num_seqs"])
        options["max_num_batched_tokens"] = budget
    config = replace(setup.config, **options)
    num_tokens = setup.num_kv_blocks * setup.config.block_size
    return replace(setup, config=config, num_kv_blocks=num_tokens // config.block_size)


def score(summary: Mapping[str, Any], goal: Goal) -> tuple[float, float]:
    """Return what is to be as high as possible: goodput, then low latencies beside their goals."""
    excess = summary["ttft_p99"] / goal.slo_ttft + summary["tpot_p99"] / goal.slo_itl
    # Rates that differ by less than a thousandth are equal: the last request decides them.
    return (float(f"{summary['goodput']:.3g}"), -excess)


def halve(
    setup: Setup,
    candidates: list[Options],
    traffic: Traffic,
    num_requests: int,
    goal: Goal,
    num_replicas: int = 1,
    show: Callable[[str], None] = print,
) -> list[Trial]:
    """Return the trials of the last round, which ran all requests, the best first.

    Candidates that the engine rejects, such as a budget below `max_num_seqs`, are left out. Raises
    `ValueError` if all are rejected.
    """
    check_int("num_requests", num_requests, 1)
    setups, problem = _accepted(setup, candidates)
    require(bool(setups), f"the engine rejects all candidates: {problem}")
    number, left = num_requests, len(setups)
    while left > _KEPT and number // _KEPT >= _FEWEST_REQUESTS:
        number, left = number // _KEPT, -(-left // _KEPT)
    while True:
        settings = FleetSettings(num_replicas)
        trials = []
        for options, candidate in setups:
            results = Fleet(candidate, settings).run(FirstOf(traffic, number))
            trials.append(Trial(options, goal.summary(results), number))
        trials.sort(key=lambda trial: score(trial.summary, goal), reverse=True)
        show(f"{len(trials)} candidates, {number} requests: best {trials[0].describe()}")
        if number == num_requests:
            return trials
        kept = [trial.options for trial in trials[: max(2, -(-len(trials) // _KEPT))]]
        setups = [one for one in setups if one[0] in kept]
        number = min(num_requests, number * _KEPT)
        if len(setups) <= 2:
            number = num_requests


def _accepted(setup: Setup, candidates: list[Options]) -> tuple[list[tuple[Options, Setup]], str]:
    accepted, problem = [], ""
    for options in candidates:
        try:
            accepted.append((options, with_options(setup, options)))
        except ValueError as error:
            problem = str(error)
    return accepted, problem
