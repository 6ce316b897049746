"""Chapter 28's numbers by hand: clocks, fits, leaps, queues, plans and policies."""

import numpy as np
import pytest

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


REQUESTS = [(0, 5, 3), (7, 4, 2), (80, 3, 1)]


def test_the_clock_by_hand() -> None:
    # 10 ms and 1 ms a token: 5 tokens, then 1 + 4, then 1 + 1; C finds an idle engine at 80 ms.
    ends = [(round(1000 * end, 6), tokens) for end, tokens in worked.timeline(REQUESTS)]
    assert ends == [(15, {"0": 5}), (30, {"0": 1, "1": 4}), (42, {"0": 1, "1": 1}), (93, {"2": 3})]
    rows = cells(worked.timeline_table(REQUESTS))
    assert rows[1] == ["15 ms", "A: 1, B: 4", "30 ms", ""]
    assert rows[3] == ["80 ms", "C: 3", "93 ms", "42 → 80 ms"]


def test_fits_by_hand() -> None:
    exact = worked.fits([(1, 3.0), (2, 5.0), (10, 21.0)])  # 1 + 2 n
    assert exact["ordinary"] == pytest.approx([1, 2])
    assert exact["non-negative"] == pytest.approx([1, 2])
    steps = [(200, 3.8), (400, 8.1), (800, 17.0)]
    found = worked.fits(steps)
    assert found["ordinary"][0] < 0 and found["non-negative"][0] == 0
    # With no fixed time: sum of x / sum of x squared, for x = tokens / ms.
    x = np.array([n / ms for n, ms in steps])
    assert found["non-negative"][1] == pytest.approx(x.sum() / (x**2).sum())
    ordinary, other = cells(worked.fit_table(steps, 8))
    assert ordinary[-1].startswith("-") and float(other[-1].split()[0]) > 0


def test_a_replay_is_equal_and_another_option_is_found() -> None:
    counts, difference = worked.replayed()
    assert difference is None and counts["preemptions"] == 1
    assert worked.replayed(16)[1].startswith("step 0: batch {'num_tokens': 63")
    assert all(row[1] == row[2] for row in cells(worked.replay_table()))


def test_leaps_are_equal_and_fewer_steps_are_computed() -> None:
    (steps, one_by_one), (leapt, computed) = worked.leaps(False), worked.leaps(True)
    assert [*steps.finished.end] == [*leapt.finished.end]
    assert steps.stats.num_steps == leapt.stats.num_steps == one_by_one > 5 * computed
    first, second = cells(worked.leap_table())
    assert first[1] == second[1] and first[3] == second[3]


def test_queues_by_hand() -> None:
    assert worked.lindley([0, 1, 2, 20], 4) == [0, 3, 6, 0]
    assert worked.md1_wait(0.5, 1.0) == 0.5
    assert worked.md1_wait(0.9, 1.0) == pytest.approx(4.5)
    times = worked.poisson(0.5, 1000, 0)
    assert times[-1] == pytest.approx(1000 * worked.SERVICE / 0.5)
    waits = worked.engine_waits(times[:300])
    assert waits == pytest.approx(worked.lindley(times[:300], worked.SERVICE), abs=1e-9)


@pytest.mark.parametrize(
    "load", [0.5, *(pytest.param(load, marks=pytest.mark.size("full")) for load in (0.8, 0.9))]
)
def test_the_formula_is_met(load: float) -> None:
    found = worked.queue(load)
    assert found["difference"] < 1e-9
    assert found["many"] == pytest.approx(found["formula"], rel=0.02)


def test_a_row_of_a_queue() -> None:
    row = cells(worked.queue_table([0.5]))[0]
    assert row[4] == "none" and row[1] == "5.00 ms"
    assert row[3] == f"{worked.off_by_chance(0.5):+.1%}" == "-3.1%"  # 4.85 ms


def test_errors_are_amplified() -> None:
    # load 0.9, 3 % longer: 0.927 x 1.03 / (2 x 0.073) instead of 0.9 / 0.2
    assert worked.amplified(0.9, 0.03) == pytest.approx(0.927 * 1.03 / 0.146 / 4.5 - 1)
    assert cells(worked.amplified_table([0.9], [0.03])) == [["90%", "+45%"]]


def test_requests_are_counted_over_time() -> None:
    found = worked.at_share(0.5)
    # Little's law, with the rate and the mean time of the same run.
    assert found["in_engine"] == pytest.approx(worked.slots_in_use(0.5), rel=0.02)
    row = cells(worked.saturation_table([0.5]))[0]
    assert row[0] == "50%" and row[-1] == "100%"


@pytest.mark.size("full")
def test_latencies_grow_beyond_the_highest_rate() -> None:
    low, high = worked.at_share(0.7), worked.at_share(1.3)
    assert high["ttft_p99"] > 10 * low["ttft_p99"]
    assert high["itl_p50"] < 1.5 * low["itl_p50"]
    assert worked.highest_rate() == pytest.approx(23.4, rel=0.03)


@pytest.mark.size("full")
def test_plans() -> None:
    assert worked.plan(1, 64).num_gpus == 3
    assert worked.plan(4, 64).num_gpus == 8
    assert worked.plan(4, 128).num_gpus == 4
    assert "max_num_seqs" in cells(worked.plan_table([(4, 64)]))[0][-1]


@pytest.mark.parametrize(
    "name", ["eviction", *(pytest.param(n, marks=pytest.mark.size("full")) for n in ("shortest",))]
)
def test_experiments(name: str) -> None:
    usual, other = worked.experiment(name).values()
    if name == "eviction":
        assert usual["hit rate"] > other["hit rate"] + 0.1
    else:
        assert other["mean TTFT"] < 0.6 * usual["mean TTFT"]
        assert other["mean, longest tenth"] > 2 * usual["mean, longest tenth"]
    assert len(cells(worked.experiment_table(name))) == 2
