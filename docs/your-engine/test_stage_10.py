"""Stage 10: your engine compared with nanoserve, token by token and step by step."""

import pytest

from . import your_engine
from .compare import Run, by_nanoserve, by_yours, first_difference, workload
from .stages import stage


def num_hits(run: Run) -> int:
    """Number of requests that found a prefix in the cache when they were first admitted."""
    starts: dict[int, int] = {}
    for step in run.steps:
        for request, (start, _) in step.rows.items():
            starts.setdefault(request, start)
    return sum(start > 0 for start in starts.values())


@pytest.mark.parametrize("seed", [0, 1])
@stage(10)
def test_tokens_and_steps_are_nanoserves(seed: int) -> None:
    requests = workload(50, seed)
    yours = by_yours(your_engine, requests)
    theirs = by_nanoserve(requests)
    preempted = sum(len(step.preempted) for step in theirs.steps)
    assert preempted > 3 and num_hits(theirs) > 10, f"workload(50, {seed}) preempts too little"
    for name in ("steps", "tokens", "reasons", "texts"):
        found, expected = getattr(yours, name), getattr(theirs, name)
        i = first_difference(found, expected)
        assert i is None, (
            f"{name}[{i}] of workload(50, {seed}), repeat it with compare.py --seed {seed}: "
            f"yours {found[i : i + 1]}, nanoserve {expected[i : i + 1]}, "
            f"{'' if name == 'steps' else requests[i : i + 1]}"
        )
