"""The numbers of the page: how long our engine is, how long it takes, what the comparison asks."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import facts
from reading import lines_of_code

FOLDER = Path(__file__).parent


class Stage(NamedTuple):
    number: int
    chapters: tuple[str, ...]  # their folders
    what: str
    minutes: int
    difficulty: int  # 1: one idea, 2: several rules at once, 3: traps
    leads_to: str


STAGES = (
    Stage(1, ("02-transformer",), "the model, and naive generation", 90, 2, "2, 3 and 7"),
    Stage(2, ("03-kv-cache",), "a KV cache for one sequence", 20, 1, "3"),
    Stage(3, ("04-paging",), "a pool of blocks", 30, 1, "7"),
    Stage(4, ("05-block-manager",), "who owns which block; prefix cache", 60, 3, "5"),
    Stage(5, ("06-scheduler",), "who runs, and how many tokens of each", 60, 2, "6 and 9"),
    Stage(6, ("07-preemption",), "chunks and preemption", 45, 3, "9"),
    Stage(7, ("08-packed-batch",), "a step as one packed batch", 30, 2, "9"),
    Stage(8, ("11-sampling",), "temperature, top-k, top-p, seeds", 45, 2, "9"),
    Stage(9, ("12-output", "13-request-life"), "the loop, and the text", 75, 2, "10"),
    Stage(10, ("15-benchmarking",), "the comparison with nanoserve", 30, 2, "nanoserve itself"),
)


def lines() -> int:
    """Lines of code of our solution."""
    return lines_of_code(FOLDER / "solution.py")


def given() -> int:
    """Of which so many are given: the imports, and what stages pass to each other."""
    text = (FOLDER / "solution.py").read_text(encoding="utf-8")
    parts = text.split("\n# -- ")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "given.py"
        names = [part for part in parts[1:] if part.startswith("Given")]
        file.write_text("\n# ".join([parts[0], *names]), encoding="utf-8")
        return lines_of_code(file)


def _chapters(stage: Stage) -> Iterator[str]:
    for folder in stage.chapters:
        yield f"[{int(folder.split('-')[0])}](../{folder}/index.md)"


def stages() -> str:
    """All stages as a table."""
    rows = [
        "| stage | what | chapter | minutes | difficulty | leads to |",
        "|---|---|---|---|---|---|",
    ]
    for stage in STAGES:
        title = f"[{stage.number}](#stage-{stage.number})"
        cells = (title, stage.what, ", ".join(_chapters(stage)), stage.minutes, stage.difficulty)
        rows.append("| " + " | ".join(map(str, (*cells, stage.leads_to))) + " |")
    return "\n".join(rows)


def facts_of(number: int) -> str:
    """The line under the heading of a stage."""
    stage = STAGES[number - 1]
    noun = "Chapter" if len(stage.chapters) == 1 else "Chapters"
    goal = stage.leads_to if number == len(STAGES) else f"stage {stage.leads_to}"
    if "and" in goal and number < len(STAGES):
        goal = f"stages {stage.leads_to}"
    chapters = " and ".join(_chapters(stage))
    return (
        f"{noun} {chapters}; about {stage.minutes} minutes; difficulty {stage.difficulty} of 3; "
        f"leads to {goal}."
    )


def hours() -> str:
    """All stages together."""
    return f"{round(sum(stage.minutes for stage in STAGES) / 60)} hours"


@cache
def _comparison() -> tuple[int, int, int, int]:
    """Requests, steps, preemptions, requests with a prefix hit: of our engine in `compare.py`."""
    compare, solution = (facts.load(FOLDER / name) for name in ("compare.py", "solution.py"))
    requests = compare.workload()
    run: Any = compare.by_yours(solution, requests)
    starts: dict[int, int] = {}
    for step in run.steps:
        for request, (start, _) in step.rows.items():
            starts.setdefault(request, start)
    preempted = sum(len(step.preempted) for step in run.steps)
    return len(requests), len(run.steps), preempted, sum(start > 0 for start in starts.values())


def requests() -> int:
    """How many the comparison makes."""
    return _comparison()[0]


def steps() -> int:
    """In how many steps they are answered."""
    return _comparison()[1]


def preemptions() -> int:
    """How often a sequence gives way in them."""
    return _comparison()[2]


def hits() -> int:
    """How many of the requests find the beginning of their prompt in the prefix cache."""
    return _comparison()[3]
