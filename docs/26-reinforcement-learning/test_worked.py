"""Chapter 26's numbers by hand: times, advantages, ratios, sums, and what was recorded."""

import math

import numpy as np
import pytest

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_lengths_have_the_same_mean() -> None:
    varied = worked.answer_lengths(varied=True)
    assert varied.mean() == pytest.approx(2_000, rel=0.01)
    assert varied.max() == round(2_000 * math.log(256))  # the last of 128 quantiles
    assert worked.answer_lengths(varied=True, limit=4_000).max() == 4_000
    assert set(worked.answer_lengths(varied=False).tolist()) == {2_000}


def test_the_time_of_rollouts_and_of_an_update() -> None:
    one = np.array([3])  # three steps, with 200, 201 and 202 tokens in the cache
    read = 3 * 2 * 8_030_261_248 + (200 + 201 + 202) * 131_072
    assert worked.rollout_seconds(one) == pytest.approx(read / 3.35e12)
    two = np.array([3, 1])  # the second one has ended after the first step
    assert worked.rollout_seconds(two) == pytest.approx((read + 200 * 131_072) / 3.35e12)
    assert worked.update_seconds(one) == pytest.approx(6 * 8_030_261_248 * 203 / 494.5e12)
    equal, varied, cut = cells(worked.step_table())
    assert [equal[1], varied[1], cut[1]] == ["2,000", "11,090", "4,000"]
    assert float(equal[-1][:-1]) < float(cut[-1][:-1]) < float(varied[-1][:-1])


def test_advantages() -> None:
    found = worked.advantages([1, 0, 0, 0])  # mean 1/4, deviation sqrt((9 + 3) / 16 / 3) = 1/2
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-3)
    assert worked.advantages([1, 1, 1]).tolist() == [0, 0, 0]
    rows = cells(worked.advantage_table([0, 1, 4, 8]))
    assert rows[0] == ["0 of 8", "", "+0.00"] and rows[3] == ["8 of 8", "+0.00", ""]
    assert rows[1] == ["1 of 8", "+2.47", "-0.35"]  # 7/8 and -1/8 over sqrt(1/8)
    assert rows[2] == ["4 of 8", "+0.94", "-0.94"]  # 1/2 over sqrt(2/7), and the 1e-4


def test_the_clipped_ratio() -> None:
    assert worked.clipped_term(0.5, 0.5, 2.0) == (1.0, 2.0, True)
    assert worked.clipped_term(0.5, 0.75, 1.0) == (1.5, 1.2, False)
    assert worked.clipped_term(0.5, 0.75, -1.0) == (1.5, -1.5, True)  # back, from any distance
    assert worked.clipped_term(0.5, 0.25, 1.0) == (0.5, 0.5, True)
    assert worked.clipped_term(0.5, 0.25, -1.0) == (0.5, -0.8, False)
    assert [row[-1] for row in cells(worked.clip_table())] == [
        *("more likely", "more likely", "not moved", "less likely", "more likely", "not moved")
    ]


def test_a_token_of_several_distributions() -> None:
    raw, warm = worked.probabilities(), worked.probabilities(0.5)
    assert raw[0] / raw[1] == pytest.approx(math.e)
    assert warm[0] / warm[1] == pytest.approx(math.e**2)
    kept = worked.probabilities(1.0, 0.6)  # the first has 0.644, which is enough
    assert kept.tolist() == [1, 0, 0, 0]
    assert worked.probabilities(1.0, 0.7)[:2] == pytest.approx(raw[:2] / raw[:2].sum())
    rows = cells(worked.distribution_table(0.7, 0.9))
    assert rows[0][1] == "0.644" and rows[3][-1] == "never sampled"


def test_orders_of_additions() -> None:
    half = np.array([2048, 1, 1, 1, 1, 1, 1, 1], dtype=np.float16)
    # Between 2048 and 4096 a float16 is even: 2048 + 1 is 2048 again, and 2048 + 7 a tie.
    assert worked.one_by_one(half) == 2048 and worked.one_by_one(half[::-1]) == 2056
    assert worked.in_parts(half, 2) == 2048 + 4
    assert worked.in_lanes(half, 4) == 2048 + 2 + 2 + 2
    assert worked.in_pairs(half) == 2048 + 2 + 4
    assert {row[2] for row in cells(worked.order_table())} == {"2055"}
    sums = [float(add(worked.products())) for add in worked.ORDERS.values()]
    exact = float(worked.products().astype(np.float64).sum())
    assert len(set(sums)) > 1 and sums == pytest.approx([exact] * 5, rel=1e-4)


def test_the_cache_beside_a_second_model() -> None:
    assert worked.tokens_in(2**20) == 8
    assert worked.pool_tokens(1) == (72_000_000_000 - 16_060_522_496) // 131_072
    assert worked.pool_tokens(1) - worked.pool_tokens(2) == pytest.approx(122_532, abs=1)


def test_the_recorded_runs() -> None:
    found = worked.recorded()
    assert len(found["runs"]) == 3 and all(len(run["steps"]) == 20 for run in found["runs"])
    rows = cells(worked.learning_table([0, 19]))
    assert [row[0] for row in rows] == ["0", "19"] and all(len(row) == 6 for row in rows)
    for before, after in zip(rows[0][1:4], rows[1][1:4], strict=True):
        assert float(after) > float(before) + 0.5
    assert all(float(row[-1]) < 1e-4 for row in rows)
    assert found["date"] in worked.learning_facts()
    stale = cells(worked.stale_table())
    assert [row[0] for row in stale] == list("012345")
    assert stale[3][1:] == ["1.5e-06", "2.3e-01", "1.8e-01"]
    first, *others = cells(worked.mismatch_table())
    assert float(first[1]) < 1e-5 < float(others[0][1])
    assert [row[3] for row in others[:2]] == ["1.32313", "1.36343"]  # exp(0.28), exp(0.31)
