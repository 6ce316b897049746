"""Many replicas in cells: groups that each have a router of their own, simulated in parallel.

One router for a thousand replicas is a bottleneck, in a simulation as in a service: it compares all
of them for each request. Large services have cells instead, which share nothing and get the same
part of the traffic. So cells are independent: they are computed in several processes, and a sample
of them says what the others do, with the spread between them as the error.
"""

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from nanoserve.cli.simulate.fleet import Fleet, FleetSettings
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.replica import Setup
from nanoserve.cli.simulate.sessions import Sessions
from nanoserve.utils.checks import check_int, require

_RATES = ("request_rate", "goodput", "output_tokens_per_s")  # these add up over cells


@dataclass(frozen=True)
class CellSettings:
    """A service of `num_cells` cells, of which `num_sampled` are simulated.

    kind, rate, seconds: of the sessions of one cell; see `Sessions`.
    """

    setup: Setup
    num_cells: int
    replicas_per_cell: int
    kind: str
    rate: float
    seconds: float
    num_sampled: int
    goal: Goal
    longest: int = 16_000
    router: str = "approximate"

    def __post_init__(self) -> None:
        check_int("num_cells", self.num_cells, 1)
        check_int("num_sampled", self.num_sampled, 1)
        require(
            self.num_sampled <= self.num_cells,
            f"num_sampled={self.num_sampled} must be at most num_cells={self.num_cells}",
        )

    @property
    def num_replicas(self) -> int:
        return self.num_cells * self.replicas_per_cell


@dataclass(frozen=True)
class ServiceResults:
    """The results of a service: means over the sampled cells, rates of all cells.

    errors: standard errors of the means; 0 if all cells were simulated, infinite for one of many.
    """

    summary: dict[str, float]
    errors: dict[str, float]
    num_requests: int  # simulated

    def line(self, name: str) -> str:
        return f"{self.summary[name]:.4g} +- {self.errors[name]:.2g}"


def simulate_cell(settings: CellSettings, number: int) -> tuple[dict[str, float], int]:
    """Return the summary of one cell, and its number of requests; its number is its seed."""
    setup = settings.setup
    traffic = Sessions(
        settings.kind,
        settings.rate,
        settings.seconds,
        setup.model_config.vocab_size - 1,
        number,
        settings.longest,
    )
    fleet_settings = FleetSettings(settings.replicas_per_cell, settings.router, seed=number)
    results = Fleet(setup, fleet_settings).run(traffic)
    return settings.goal.summary(results), len(results.finished)


def simulate_cells(
    settings: CellSettings, num_processes: int = 1, show: Callable[[str], None] | None = None
) -> ServiceResults:
    """Simulate the sampled cells, in `num_processes` processes, with the same result for any."""
    numbers = range(settings.num_sampled)
    found: list[tuple[dict[str, float], int]] = []
    if check_int("num_processes", num_processes, 1) == 1:
        for number in numbers:
            found.append(simulate_cell(settings, number))
            _show(show, found, settings)
    else:
        context = get_context("spawn")
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            for cell in pool.map(simulate_cell, [settings] * len(numbers), numbers):
                found.append(cell)
                _show(show, found, settings)
    return _together(settings, found)


def _show(show: Callable[[str], None] | None, found: list[Any], settings: CellSettings) -> None:
    if show is not None:
        show(f"{len(found)} of {settings.num_sampled} cells")


def _together(settings: CellSettings, found: list[tuple[dict[str, float], int]]) -> ServiceResults:
    """Return means and their errors; rates are multiplied by the number of cells."""
    count, num_cells = len(found), settings.num_cells
    summary, errors = {}, {}
    for name in found[0][0]:
        values = [cell[name] for cell, _ in found]
        scale = num_cells if name in _RATES or name == "num_preemptions" else 1
        mean = sum(values) / count
        summary[name] = scale * mean
        variance = sum((value - mean) ** 2 for value in values) / max(1, count - 1)
        unseen = 1 - count / num_cells  # of a sample without replacement
        is_known = count > 1 or num_cells == 1
        errors[name] = scale * math.sqrt(variance / count * unseen) if is_known else math.inf
    return ServiceResults(summary, errors, sum(number for _, number in found))
