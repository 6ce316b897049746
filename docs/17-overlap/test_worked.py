"""Numbers of chapter 17, against a count by hand. They come from the engine's own loop."""

import random

import pytest

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_without_async_scheduling_host_and_device_wait_for_each_other() -> None:
    assert cells(worked.timeline((1, 3.5, 0.5, 1), ahead=False)) == [
        ["1", "0 - 1", "1 - 5", "5 - 6"],
        ["2", "6 - 7", "7 - 11", "11 - 12"],
        ["3", "12 - 13", "13 - 17", "17 - 18"],
    ]


def test_with_async_scheduling_the_device_never_waits() -> None:
    assert cells(worked.timeline((1, 3.5, 0.5, 1), ahead=True, num_steps=4)) == [
        ["1", "0 - 1", "1 - 5", "5 - 6"],
        ["2", "1 - 2", "5 - 9", "9 - 10"],
        ["3", "6 - 7", "9 - 13", "13 - 14"],
        ["4", "10 - 11", "13 - 17", "17 - 18"],
    ]


def test_a_slow_host_determines_the_step_time() -> None:
    rows = worked.steps_table([(1, 3.5, 0.5, 1), (2, 3.5, 0.5, 2), (3, 3.5, 0.5, 3)])
    assert cells(rows) == [
        ["2", "4", "6", "4", "1.50", "100 %"],
        ["4", "4", "8", "4", "2.00", "100 %"],
        ["6", "4", "10", "6", "1.67", "67 %"],
    ]


def test_the_formula_gives_the_step_time_of_the_loop() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        costs = worked.Costs(*(rng.randint(1, 16) / 4 for _ in range(4)))
        for ahead in (False, True):
            device = worked._run([14], [False], costs, ahead)
            # The last step has no successor that is planned while it runs.
            earlier, later = device.spans[8][1], device.spans[10][1]
            found = (later[1] - earlier[1]) / 2
            assert found == pytest.approx(worked.step_ms(*costs, ahead)), (costs, ahead)


def test_an_end_by_length_is_known_in_advance_and_an_end_by_eos_is_not() -> None:
    assert cells(worked.rows_table(20)) == [
        ["by its length", "20", "20", "20", "0"],
        ["by EOS", "20", "21", "22", "1"],
    ]
    # 100 tokens take 102 rows: one each, one that yields EOS, and one after it.
    assert worked.late_share(100) == pytest.approx(100 / 102)


def test_the_row_of_a_request_that_has_ended_is_discarded() -> None:
    table = worked.plans_table([2, 2, 5], [False, True, False])
    assert cells(table) == [
        ["1", "A, B, C", "A: a token, B: a token, C: a token"],
        ["2", "A, B, C", "A: a token, B: a token, C: a token"],
        ["3", "B, C", "B: EOS, C: a token"],
        ["4", "B, C", "B: discarded, C: a token"],
        ["5", "C", "C: a token"],
    ]
    # If no request is left, the engine does not wait for the last step.
    last = cells(worked.plans_table([2, 2], [True, True]))[-1]
    assert last == ["4", "A, B", "A: cancelled, B: cancelled"]


def test_a_block_is_cached_when_its_last_token_is_known() -> None:
    assert [row[1:] for row in cells(worked.caching_table())] == [
        ["3", "1", "3", "0"],
        ["3", "1", "3", "0"],
        ["4", "0", "3", "0"],
        ["4", "1", "4", "1"],
    ]


def test_ratio_and_busy_time() -> None:
    assert worked.ratio(13375, 10226) == pytest.approx(1.3079, abs=1e-4)
    assert worked.busy_us(13375, 77) == pytest.approx(10298.75)
