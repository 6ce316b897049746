"""Cells of replicas in several processes, and drafts that are right with a chance."""

import math
from dataclasses import replace

import pytest
from simulated import TIME, Listed, make_setup, random_traffic, simulate

from nanoserve.cli.simulate.cells import CellSettings, simulate_cell, simulate_cells
from nanoserve.cli.simulate.drafts import DrawnDrafts, drawn_drafts
from nanoserve.cli.simulate.planner import Goal
from nanoserve.cli.simulate.step_time import LinearTime
from nanoserve.cli.simulate.traffic import Arrival


def settings(num_cells: int, num_sampled: int) -> CellSettings:
    setup = make_setup(2000, max_model_len=4096)
    return CellSettings(setup, num_cells, 2, "chat", 1.5, 10.0, num_sampled, Goal(), 2000)


def test_cells_are_summed_up() -> None:
    some = settings(40, 4)
    cells = [simulate_cell(some, number) for number in range(4)]
    together = simulate_cells(some)
    assert together.num_requests == sum(count for _, count in cells) > 30
    rates = [summary["request_rate"] for summary, _ in cells]
    mean = sum(rates) / 4
    assert len({*rates}) == 4
    assert together.summary["request_rate"] == pytest.approx(40 * mean)
    variance = sum((rate - mean) ** 2 for rate in rates) / 3
    error = 40 * math.sqrt(variance / 4 * (1 - 4 / 40))
    assert together.errors["request_rate"] == pytest.approx(error)
    ttft = sum(summary["ttft_p50"] for summary, _ in cells) / 4
    assert together.summary["ttft_p50"] == pytest.approx(ttft)
    assert simulate_cells(settings(2, 2)).errors["ttft_p50"] == 0.0
    assert simulate_cells(settings(2, 1)).errors["ttft_p50"] == math.inf
    assert "+-" in together.line("ttft_p50")


@pytest.mark.size("full")  # processes that import numpy
def test_processes_do_not_change_results() -> None:
    said: list[str] = []
    assert simulate_cells(settings(9, 3), 2, said.append) == simulate_cells(settings(9, 3))
    assert said[-1] == "3 of 3 cells"


def test_cells_are_checked() -> None:
    with pytest.raises(ValueError, match="num_sampled=5 must be at most num_cells=4"):
        settings(4, 5)
    with pytest.raises(ValueError, match="num_cells=0 must be"):
        settings(0, 1)


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_as_many_drafts_are_accepted_as_their_chance(acceptance: float) -> None:
    setup = replace(make_setup(3000), extensions=(drawn_drafts(3, acceptance),))
    traffic = Listed([Arrival(0.0, [i, 1, 2], [5, 6] * 200, 400) for i in range(16)])
    results, _ = simulate(setup, traffic)
    stats = results.stats
    expected = sum(acceptance**k for k in (1, 2, 3)) / 3
    assert stats.num_draft_tokens > 1000
    assert stats.num_accepted_tokens / stats.num_draft_tokens == pytest.approx(expected, abs=0.02)


def test_drafts_change_no_output_and_save_steps() -> None:
    traffic = random_traffic(3, num_requests=40)
    plain, _ = simulate(make_setup(), traffic)
    cheap = LinearTime(0.02, TIME.per_token)  # reading the weights dominates
    setup = replace(make_setup(), step_time=cheap)
    drafts, _ = simulate(replace(setup, extensions=(drawn_drafts(4, 0.8),)), traffic)
    without, _ = simulate(setup, traffic)
    assert drafts.stats.num_output_tokens == plain.stats.num_output_tokens
    assert drafts.stats.num_steps < 0.7 * without.stats.num_steps
    assert drafts.summary()["tpot_mean"] < 0.7 * without.summary()["tpot_mean"]
    dear = replace(setup, step_time=LinearTime(0.001, 0.01))  # computing dominates
    drafts, _ = simulate(replace(dear, extensions=(drawn_drafts(4, 0.2),)), traffic)
    without, _ = simulate(dear, traffic)
    assert drafts.summary()["e2e_mean"] > without.summary()["e2e_mean"]


def test_drafts_are_checked() -> None:
    for make, message in (
        (drawn_drafts(0, 0.5), "num_draft_tokens=0 must be"),
        (drawn_drafts(2, 1.5), "acceptance=1.5 must be"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(replace(make_setup(), extensions=(make,)), random_traffic(0))
    from counting_executor import make_engine

    with pytest.raises(ValueError, match="simulated executor only"):
        DrawnDrafts(make_engine(), 2, 0.5)
