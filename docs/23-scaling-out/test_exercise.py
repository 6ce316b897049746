"""The exercise of chapter 23 against a tick-by-tick simulation, all splits, and the engine."""

import itertools
import random

import pytest

from nanoserve.features.parallel.pipeline_stage import split_layers

from .exercise import bubble, run_pipeline, share_layers

UNIT = [[1, 1, 1]]


def test_four_steps_pass_three_stages_in_six_units() -> None:
    spans = run_pipeline(UNIT * 4, num_groups=4)
    expected = [[(i + s, i + s + 1) for s in range(3)] for i in range(4)]
    assert spans == expected, f"{UNIT * 4=}, 4 groups: {spans}"
    assert bubble(spans) == pytest.approx(2 / 6), spans


def test_a_single_group_has_one_stage_busy_at_a_time() -> None:
    spans = run_pipeline([[1, 1]] * 3, num_groups=1)
    expected = [[(0, 1), (1, 2)], [(2, 3), (3, 4)], [(4, 5), (5, 6)]]
    assert spans == expected, f"three steps of [1, 1], one group: {spans}"
    assert bubble(spans) == pytest.approx(1 / 2), spans


def test_with_as_many_groups_as_stages_no_stage_waits_in_the_middle() -> None:
    spans = run_pipeline([[1, 1]] * 100, num_groups=2)
    assert spans[-1][-1][1] == 101, f"100 steps of [1, 1], two groups, end at {spans[-1][-1]}"
    assert bubble(spans) == pytest.approx(1 / 101), "only filling and draining is left"


def test_a_slow_stage_keeps_the_others_waiting() -> None:
    spans = run_pipeline([[1, 3]] * 3, num_groups=3)
    expected = [[(0, 1), (1, 4)], [(1, 2), (4, 7)], [(2, 3), (7, 10)]]
    assert spans == expected, f"three steps of [1, 3], three groups: {spans}"


def test_the_head_counts_as_part_of_the_last_stage() -> None:
    cut = share_layers([2, 2, 2, 2], head=4, num_stages=2)
    assert cut == [range(0, 3), range(3, 4)], f"sizes [2, 2, 2, 2], head 4, 2 stages: {cut}"


def by_the_clock(durations: list[list[int]], num_groups: int) -> list[list[tuple[int, int]]]:
    """The same result in another way: tick by tick, each step begins as soon as it may."""
    num_steps, num_stages = len(durations), len(durations[0])
    ends = [[-1] * num_stages for _ in range(num_steps)]
    spans = [[(-1, -1)] * num_stages for _ in range(num_steps)]
    upcoming = [0] * num_stages
    for now in itertools.count():
        for s in range(num_stages):
            i = upcoming[s]
            if i == num_steps or (i and not 0 <= ends[i - 1][s] <= now):
                continue
            before = ends[i][s - 1] if s else ends[i - num_groups][-1] if i >= num_groups else 0
            if 0 <= before <= now:
                ends[i][s] = now + durations[i][s]
                spans[i][s] = (now, ends[i][s])
                upcoming[s] += 1
        if upcoming[-1] == num_steps:
            return spans


@pytest.mark.parametrize("seed", range(60))
def test_spans_are_those_of_a_simulation_by_ticks(seed: int) -> None:
    rng = random.Random(seed)
    num_stages, num_groups = rng.randint(1, 4), rng.randint(1, 5)
    durations = [[rng.randint(1, 5) for _ in range(num_stages)] for _ in range(rng.randint(1, 12))]
    case = f"run_pipeline({durations}, {num_groups=})"
    spans, expected = run_pipeline(durations, num_groups), by_the_clock(durations, num_groups)
    assert spans == expected, f"{case}: {spans}, not {expected}"
    used = sum(map(sum, durations)) / num_stages / expected[-1][-1][1]
    assert bubble(spans) == pytest.approx(1 - used), case


@pytest.mark.parametrize("seed", range(60))
def test_the_largest_stage_is_that_of_the_engine_and_the_best_of_all_splits(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
    head, num_stages = rng.randint(0, 20), rng.randint(1, min(4, len(sizes)))
    case = f"share_layers({sizes}, {head=}, {num_stages=})"
    cut = share_layers(sizes, head, num_stages)
    layers = [index for part in cut for index in part]
    assert layers == list(range(len(sizes))), f"{case}: {cut}"
    assert len(cut) == num_stages and all(cut), f"{case}: {cut}"
    found = max(sum(sizes[i] for i in part) + head * (part is cut[-1]) for part in cut)
    least = min(
        max(sum(sizes[a:b]) + head * (b == len(sizes)) for a, b in itertools.pairwise(ends))
        for inner in itertools.combinations(range(1, len(sizes)), num_stages - 1)
        for ends in [(0, *inner, len(sizes))]
    )
    assert found == least, f"{case}: {cut}, whose largest is {found}, not {least}"
    engines_cut = split_layers(sizes, 0, head, num_stages)
    engines = max(sum(sizes[i] for i in p) + head * (p is engines_cut[-1]) for p in engines_cut)
    assert found == engines, f"{case}: the engine's largest is {engines}"
