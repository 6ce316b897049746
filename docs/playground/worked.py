"""The numbers on the playground's page, from the runs of the scheduler."""

import re
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import facts

runs = facts.load(Path(__file__).with_name("runs.py"))


def num_settings() -> int:
    return prod(map(len, runs.OPTIONS.values()))


def num_blocks(pool: int, block_size: int) -> int:
    return pool // block_size


def total(name: str, **changes: int | str | bool) -> float:
    """One of `runs.TOTALS`, for the defaults with some changes."""
    return _run(**changes).totals[runs.TOTALS.index(name)]


def first_token(request: str, **changes: int | str | bool) -> int:
    """The step that computes the first token of a request."""
    for number, step in enumerate(_run(**changes).steps, 1):
        if re.search(rf"{request}[pd]\d", step.split(";")[0]):
            return number
    raise ValueError(f"no token for {request}")


def victims(**changes: int | str | bool) -> str:
    """The preempted requests, each with the one that needed a block, in order."""
    pairs = [_pairs(step.split(";")[3]) for step in _run(**changes).steps]
    return "; ".join(f"{victim}, for {cause}" for found in pairs for victim, cause in found)


def _run(**changes: int | str | bool) -> Any:
    unknown = changes.keys() - runs.OPTIONS.keys()
    if unknown or any(value not in runs.OPTIONS[name] for name, value in changes.items()):
        raise ValueError(f"not a setting of the playground: {changes}")
    return _run_of(tuple({**runs.DEFAULTS, **changes}.items()))


@cache
def _run_of(setting: tuple) -> Any:
    return runs.run(dict(setting))


def _pairs(letters: str) -> list[str]:
    return [letters[i : i + 2] for i in range(0, len(letters), 2)]
