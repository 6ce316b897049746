"""Run the tests of exercises on the reader's files, or with `--solutions` on the solutions."""

import os

# The exercises' models are tiny, so several threads would slow each other down. Set this before
# torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent


# What the reader completes, and what has our solution.
SOLUTIONS = {
    "exercise": "solution.py",
    "your_engine": "solution.py",
    "your_features": "solution_features.py",
}


class SolutionFinder(MetaPathFinder):
    """Import hook that finds the solution in place of the file that the reader completes."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        solution = SOLUTIONS.get(name.rpartition(".")[2])
        for folder in map(Path, path or ()):
            if solution and folder.parent == DOCS:
                return spec_from_file_location(name, folder / solution)
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--solutions",
        action="store_true",
        help="test each solution.py in place of the file that the reader completes",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--solutions"):
        sys.meta_path.insert(0, SolutionFinder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Use one process for the course alone: starting a second takes longer than a test."""
    requested = [config.invocation_params.dir / argument for argument in config.args]
    return 0 if all(path.is_relative_to(DOCS) for path in requested) else None
