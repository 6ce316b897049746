"""Runs the tests of exercises: on the reader's file, or with `--solutions` on ours."""

import os

# The exercises' models are tiny: more threads than one wait for each other. Before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import pytest

SOLUTIONS = Path(__file__).parent / "solutions"


class SolutionFinder(PathFinder):
    """Finds a solution before anything else of its name.

    A folder at the front of `sys.path` would not do: pytest puts that of the test before it.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return super().find_spec(name, [str(SOLUTIONS)], target) if path is None else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--solutions", action="store_true", help="test docs/exercises/solutions/")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--solutions"):
        sys.meta_path.insert(0, SolutionFinder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One process: to start a second takes longer than an exercise's test."""
    return 0
