"""The numbers of the page: length of the solution, time of the stages, size of the comparison.

And what the features of stages 11 and 12 change in runs of the solution.
"""

import random
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
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
    Stage(
        11,
        ("06-scheduler", "07-preemption"),
        "a policy of your own",
        40,
        2,
        "nanoserve's priorities",
    ),
    Stage(
        12, ("07-preemption", "25-disaggregation"), "KV offload", 60, 2, "nanoserve's KV connectors"
    ),
    Stage(13, ("17-overlap",), "async scheduling", 90, 3, "nanoserve's own loop"),
)
FIRST_FEATURE = 11  # from here on the stages are optional, and in a second file


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


def feature_lines() -> int:
    """Lines of code of the features' solution."""
    return lines_of_code(FOLDER / "solution_features.py")


def _chapters(stage: Stage) -> Iterator[str]:
    for folder in stage.chapters:
        yield f"[{int(folder.split('-')[0])}](../{folder}/index.md)"


def stages() -> str:
    """The stages of the engine as a table."""
    return _table(STAGES[: FIRST_FEATURE - 1])


def features() -> str:
    """The stages of the features as a table."""
    return _table(STAGES[FIRST_FEATURE - 1 :])


def _table(stages: tuple[Stage, ...]) -> str:
    rows = [
        "| stage | what | chapter | minutes | difficulty | leads to |",
        "|---|---|---|---|---|---|",
    ]
    for stage in stages:
        title = f"[{stage.number}](#stage-{stage.number})"
        cells = (title, stage.what, ", ".join(_chapters(stage)), stage.minutes, stage.difficulty)
        rows.append("| " + " | ".join(map(str, (*cells, stage.leads_to))) + " |")
    return "\n".join(rows)


def facts_of(number: int) -> str:
    """The line under the heading of a stage."""
    stage = STAGES[number - 1]
    noun = "Chapter" if len(stage.chapters) == 1 else "Chapters"
    goal = stage.leads_to
    if re.fullmatch(r"[\d, and]+", goal):
        goal = f"stage {goal}" if goal.isdigit() else f"stages {goal}"
    chapters = " and ".join(_chapters(stage))
    return (
        f"{noun} {chapters}; about {stage.minutes} minutes; difficulty {stage.difficulty} of 3; "
        f"leads to {goal}."
    )


def hours() -> str:
    """The time of the engine's stages together."""
    return _hours(STAGES[: FIRST_FEATURE - 1])


def feature_hours() -> str:
    """The time of the features' stages together."""
    return _hours(STAGES[FIRST_FEATURE - 1 :])


def _hours(stages: tuple[Stage, ...]) -> str:
    return f"{round(sum(stage.minutes for stage in stages) / 60)} hours"


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


@cache
def _features() -> ModuleType:
    """The features' solution, on top of the engine's."""
    package = ModuleType("own_engine")
    package.__path__ = [str(FOLDER)]
    sys.modules["own_engine"] = package
    sys.modules["own_engine.your_engine"] = facts.load(FOLDER / "solution.py")
    sys.modules.pop("own_engine.solution_features", None)  # it may have changed
    return import_module("own_engine.solution_features")


def _bursts() -> list[tuple[int, int]]:
    """Requests as (step of arrival, tokens of output): many short ones, and a few long ones."""
    rng = random.Random(0)
    lengths = [rng.choice([5, 8, 12, 20, 200]) for _ in range(300)]
    return sorted((rng.randrange(3400), length) for length in lengths)


@cache
def _waits(aging: int) -> list[int]:
    """Steps from arrival to end of each of these requests, four at a time."""
    file = _features()
    config = file.Config(num_blocks=1000, block_size=4, max_num_seqs=4)
    scheduler = file.PolicyScheduler(config, file.shortest_first(aging))
    todo, step, ends, arrived = _bursts(), 0, {}, {}
    while todo or scheduler.waiting or scheduler.running:
        while todo and todo[0][0] <= step:
            at, length = todo.pop(0)
            seq = file.Sequence([len(arrived), 1], max_len=2 + length)
            arrived[seq] = at
            scheduler.add(seq)
        plan, step = scheduler.schedule(), step + 1
        scheduler.update(plan, [9] * len(plan.rows))
        ends |= {row.seq: step for row in plan.rows if row.seq.finish_reason}
    return [ends[seq] - at for seq, at in arrived.items()]


def num_waits() -> int:
    """Number of these requests."""
    return len(_bursts())


def policies(*agings: int) -> str:
    """Mean, median and longest time of a request in steps, by policy."""
    rows = ["| order | mean | median | longest |", "|---|---|---|---|"]
    for aging in agings:
        waits = sorted(_waits(aging))
        mean, name = sum(waits) / len(waits), f"shortest first, aging {aging}"
        if aging >= 1000:  # more than the longest: nobody is overtaken
            name = "first come, first served"
        rows.append(f"| {name} | {mean:.0f} | {waits[len(waits) // 2]} | {waits[-1]} |")
    return "\n".join(rows)


@cache
def _offloaded(host_blocks: int) -> tuple[int, int]:
    """Computed tokens of the comparison's requests, and tokens that were hits."""
    compare, file = facts.load(FOLDER / "compare.py"), _features()
    engine = file.OffloadEngine(compare.CHECKPOINT, file.Config(**compare.CONFIG), host_blocks)
    run = compare.by_engine(engine, compare.workload())
    computed = sum(n for step in run.steps for _, n in step.rows.values())
    hits, seen = 0, dict.fromkeys(range(len(run.tokens)), 0)
    for step in run.steps:
        for request in step.preempted:
            seen[request] = 0
        for request, (start, n) in step.rows.items():
            hits += start - seen[request]  # 0, unless it has just been admitted
            seen[request] = start + n
    return computed, hits


def offload(*host_blocks: int) -> str:
    """Computed tokens and hits of the comparison's requests, by the size of the host pool."""
    rows = ["| blocks of the host pool | tokens computed | tokens found | found |"]
    rows.append("|---|---|---|---|")
    for each in host_blocks:
        computed, hits = _offloaded(each)
        share = 100 * hits / (hits + computed)
        rows.append(f"| {each} | {computed:,} | {hits:,} | {share:.0f} % |")
    return "\n".join(rows)
