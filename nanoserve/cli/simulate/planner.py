"""Find the fewest GPUs that serve a load within its objectives, and the limit that binds.

For each way to use the GPUs (ranks per replica, token budget), the number of replicas is doubled
until the goal is reached, and then halved in between: more replicas never do worse, but for chance.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nanoserve.cli.simulate.fleet import Fleet, FleetSettings
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.results import Results
from nanoserve.cli.simulate.traffic import Traffic
from nanoserve.utils.checks import check_int, check_number

_NOTABLE = 0.02  # part of the time in which requests wait for slots, tokens or blocks


@dataclass(frozen=True)
class Goal:
    """The objectives of a service, checked on construction.

    attainment: the part of the requests that must have their first token within `slo_ttft` seconds
        and a mean time per further token of at most `slo_itl` seconds.
    warm_up: seconds of the run whose requests do not count.
    """

    slo_ttft: float = 1.0
    slo_itl: float = 0.1
    attainment: float = 0.95
    warm_up: float = 0.0

    def __post_init__(self) -> None:
        check_number("slo_ttft", self.slo_ttft, 0, excludes_low=True)
        check_number("slo_itl", self.slo_itl, 0, excludes_low=True)
        check_number("attainment", self.attainment, 0, 1, excludes_low=True)
        check_number("warm_up", self.warm_up, 0)

    def summary(self, results: Results) -> dict[str, float]:
        return results.summary(self.slo_ttft, self.slo_itl, self.warm_up)


@dataclass(frozen=True)
class Design:
    """A way to use GPUs: the engine of a replica, on `gpus_per_replica` GPUs."""

    name: str
    setup: Setup
    gpus_per_replica: int = 1


@dataclass(frozen=True)
class Plan:
    """The fewest replicas of a design that reach the goal, and what the last one less misses.

    num_replicas: None if the most that were allowed do not reach it; `summary` is then theirs.
    """

    design: Design
    num_replicas: int | None
    summary: dict[str, Any]
    limit: str

    @property
    def num_gpus(self) -> int | None:
        number = self.num_replicas
        return None if number is None else number * self.design.gpus_per_replica


Run = tuple[bool, dict[str, Any], str]  # whether the goal is reached, the summary, the limit


def find_plan(
    design: Design, make_traffic: Callable[[], Traffic], goal: Goal, most_replicas: int = 64
) -> Plan:
    """Return the plan of a design. `make_traffic` makes the same traffic each time."""
    check_int("most_replicas", most_replicas, 1)
    runs: dict[int, Run] = {}

    def reaches(number: int) -> bool:
        if number not in runs:
            runs[number] = _run(design, make_traffic(), goal, number)
        return runs[number][0]

    high = 1
    while not reaches(high):
        if high == most_replicas:
            return Plan(design, None, *runs[high][1:])
        high = min(2 * high, most_replicas)
    low = max([number for number in runs if number < high], default=0)  # does not reach it
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    limit = runs[low][2] if low else "one replica is enough"
    return Plan(design, high, runs[high][1], limit)


def best_plan(plans: Iterable[Plan]) -> Plan | None:
    """Return the plan with the fewest GPUs, and the highest goodput among equals."""
    found = [plan for plan in plans if plan.num_gpus is not None]
    return min(found, key=lambda p: (p.num_gpus, -p.summary["goodput"]), default=None)


def _run(design: Design, traffic: Traffic, goal: Goal, num_replicas: int) -> Run:
    results = Fleet(design.setup, FleetSettings(num_replicas)).run(traffic)
    summary = goal.summary(results)
    return summary["attainment"] >= goal.attainment, summary, binding_limit(results, summary, goal)


def binding_limit(results: Results, summary: dict[str, Any], goal: Goal) -> str:
    """Return in words which objective is missed most, and what requests have waited for."""
    percentile = "p99" if goal.attainment > 0.9 else "p90" if goal.attainment > 0.5 else "p50"
    excess = {
        "TTFT": summary[f"ttft_{percentile}"] / (1000 * goal.slo_ttft),
        "time per token": summary[f"tpot_{percentile}"] / (1000 * goal.slo_itl),
    }
    name = max(excess, key=excess.__getitem__)
    said = f"{percentile} of the {name} is {excess[name]:.2g} times its objective"
    waited = sum(results.waited_for.values()) / max(1e-9, sum(results.busy_seconds))
    if waited > _NOTABLE:
        short = max(results.waited_for, key=results.waited_for.__getitem__)
        return f"{said}; in {waited:.0%} of the time requests wait, mostly for {short}"
    return f"{said}; the GPUs are busy for {summary['busy']:.0%} of the time, and nothing is short"
