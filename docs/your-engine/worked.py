"""The numbers of the page: length of the solution, time of the stages, size of the comparison."""

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
    Stage(4, ("05-block-manager",), "block manager and prefix cache", 60, 3, "5"),
    Stage(5, ("06-scheduler",), "scheduler: sequences and tokens of a step", 60, 2, "6 and 9"),
    Stage(6, ("07-preemption",), "chunks and preemption", 45, 3, "9"),
    Stage(7, ("08-packed-batch",), "a step as one packed batch", 30, 2, "9"),
    Stage(8, ("11-sampling",), "temperature, top-k, top-p, seeds", 45, 2, "9"),
    Stage(9, ("12-output", "13-request-life"), "the loop, and the text", 75, 2, "10"),
    Stage(10, ("15-benchmarking",), "the comparison with nanoserve", 30, 2, "nanoserve itself"),
)


def lines() -> int:
    """Lines of code of the solution."""
    return lines_of_code(FOLDER / "solution.py")


def given() -> int:
    """The given lines of these: the imports, and the shared data structures."""
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
    """The time of all stages together."""
    return f"{round(sum(stage.minutes for stage in STAGES) / 60)} hours"


@cache
def _comparison() -> tuple[int, int, int, int]:
    """Requests, steps, preemptions, requests with a hit, for the solution in `compare.py`."""
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
    """Number of requests of the comparison."""
    return _comparison()[0]


def steps() -> int:
    """Number of steps in which they are answered."""
    return _comparison()[1]


def preemptions() -> int:
    """Number of preemptions in these steps."""
    return _comparison()[2]


def hits() -> int:
    """Number of requests that find a prefix of their prompt in the cache."""
    return _comparison()[3]
