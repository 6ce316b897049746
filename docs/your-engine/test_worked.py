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
    assert numbers == list(range(1, 11))
    assert all((FOLDER / f"test_stage_{number}.py").is_file() for number in numbers)
    chapters = [folder for stage in worked.STAGES for folder in stage.chapters]
    assert chapters == sorted(chapters), "they are in the order of the course"
    assert all((FOLDER.parent / folder / "index.md").is_file() for folder in chapters)
    assert len(worked.stages().splitlines()) == 12
    assert worked.facts_of(3) == (
        "Chapter [4](../04-paging/index.md); about 30 minutes; difficulty 1 of 3; leads to stage 7."
    )
    assert "leads to stages 2, 3 and 7." in worked.facts_of(1)
    assert worked.hours() == "8 hours"  # 485 minutes


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
