"""The numbers of the page, counted independently, and against a run of nanoserve."""

import re
from pathlib import Path

import pytest

from . import compare, worked

FOLDER = Path(__file__).parent


def code_lines(text: str) -> int:
    """Neither blank nor a comment; of the solution, whose only docstring is its first line."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.split("\n"))


def test_the_length_of_our_engine() -> None:
    text = (FOLDER / "solution.py").read_text(encoding="utf-8")
    assert text.count('"""') == 2 and text.startswith('"""')
    assert worked.lines() == code_lines(text) - 1
    imports, *parts = re.split(r"^# -- .*$", text, flags=re.M)
    (given,) = (part for part in parts if "class Row(" in part)
    assert worked.given() == code_lines(imports) - 1 + code_lines(given)


def test_a_stage_has_a_test_and_a_chapter() -> None:
    numbers = [stage.number for stage in worked.STAGES]
    assert numbers == list(range(1, 14))
    assert all((FOLDER / f"test_stage_{number}.py").is_file() for number in numbers)
    chapters = [folder for stage in worked.STAGES for folder in stage.chapters]
    of_the_engine = [folder for stage in worked.STAGES[:10] for folder in stage.chapters]
    assert of_the_engine == sorted(of_the_engine), "they are in the order of the course"
    assert all((FOLDER.parent / folder / "index.md").is_file() for folder in chapters)
    assert len(worked.stages().splitlines()) == 12
    assert len(worked.features().splitlines()) == 5
    assert worked.facts_of(3) == (
        "Chapter [4](../04-paging/index.md); about 30 minutes; difficulty 1 of 3; leads to stage 7."
    )
    assert "leads to stages 2, 3 and 7." in worked.facts_of(1)
    assert worked.facts_of(10).endswith("difficulty 2 of 3; leads to nanoserve itself.")
    assert worked.hours() == "8 hours"  # 485 minutes
    assert worked.feature_hours() == "3 hours"  # 190 minutes


def test_the_length_of_the_features() -> None:
    text = (FOLDER / "solution_features.py").read_text(encoding="utf-8")
    assert text.count('"""') == 2 and text.startswith('"""')
    assert worked.feature_lines() == code_lines(text) - 1


def waits_by_hand(requests: list[tuple[int, int]], aging: int) -> list[int]:
    """Four requests at a time, a token of output in each step: no preemption, nothing shared."""
    times, running, waiting, step = {}, {}, [], 0
    todo = list(enumerate(requests))
    while todo or running or waiting:
        while todo and todo[0][1][0] <= step:
            number, (_, length) = todo.pop(0)
            waiting.append((length + aging * number, number, length))
        waiting.sort()
        while waiting and len(running) < 4:
            _, number, length = waiting.pop(0)
            running[number] = length
        step += 1
        running = {number: left - 1 for number, left in running.items()}
        times |= {
            number: step - requests[number][0] for number, left in running.items() if not left
        }
        running = {number: left for number, left in running.items() if left}
    return [times[number] for number in range(len(requests))]


@pytest.mark.parametrize("aging", [1000, 10, 3, 0])
def test_the_times_of_the_policies(aging: int) -> None:
    waits = waits_by_hand(worked._bursts(), aging)
    assert worked.num_waits() == len(waits) == 300
    name = f"shortest first, aging {aging}" if aging < 1000 else "first come, first served"
    middle = sorted(waits)[len(waits) // 2]
    row = f"| {name} | {sum(waits) / len(waits):.0f} | {middle} | {max(waits)} |"
    assert worked.policies(aging).splitlines()[2] == row


@pytest.mark.size("full")
def test_the_hits_of_the_host_pool() -> None:
    """Without one they are those of the engine of stage 9; what is found is not computed."""
    compare_run = compare.by_nanoserve(compare.workload())
    computed = sum(n for step in compare_run.steps for _, n in step.rows.values())
    assert worked._offloaded(0)[0] == computed
    hits = [worked._offloaded(each)[1] for each in (0, 20, 100, 500)]
    assert hits == sorted(hits) and hits[0] < hits[-1]
    share = round(100 * hits[0] / (hits[0] + computed))
    assert worked.offload(0).splitlines()[2] == f"| 0 | {computed:,} | {hits[0]:,} | {share} % |"


@pytest.mark.size("full")
def test_the_comparison_is_of_a_run_with_preemptions_and_hits() -> None:
    requests = compare.workload()
    run = compare.by_nanoserve(requests)
    first: dict[int, int] = {}
    for step in run.steps:
        first = {request: start for request, (start, _) in step.rows.items()} | first
    assert worked.requests() == len(requests) == 50
    assert worked.steps() == len(run.steps)
    assert worked.preemptions() == sum(len(step.preempted) for step in run.steps) > 3
    assert worked.hits() == sum(map(bool, first.values())) > 10


@pytest.mark.size("full")
def test_a_policy_and_a_host_pool_combine() -> None:
    """As the page says: the tokens are those of either alone."""
    file, requests = worked._features(), compare.workload(40, 5)
    config = file.Config(**compare.CONFIG)
    both, alone = (file.OffloadEngine(compare.CHECKPOINT, config, 50) for _ in range(2))
    blocks = both.scheduler.blocks
    both.scheduler = file.PolicyScheduler(config, file.shortest_first(2))
    both.scheduler.blocks = blocks
    found, right = compare.by_engine(both, requests), compare.by_engine(alone, requests)
    assert found.steps != right.steps and sum(len(step.preempted) for step in found.steps) > 3
    assert blocks.host.contents
    assert (found.tokens, found.texts) == (right.tokens, right.texts)
