"""The course's exercises: undone they fail, solved they pass, and a chapter sets each of them."""

import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import house
import pytest

FOLDER = house.DOCS / "exercises"
SLUGS = sorted(path.stem.removeprefix("test_") for path in FOLDER.glob("test_*.py"))
every_exercise = pytest.mark.parametrize("slug", SLUGS)


@cache
def run(*options: str) -> tuple[int, dict[str, list[str]]]:
    """pytest's exit status, and for each exercise what its tests said: "" if they passed."""
    # As the reader has it: without what this suite's conftest sets for itself.
    own = ("PYTEST_", "TRITON_INTERPRET")
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(own)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", str(FOLDER), *options]
        done = subprocess.run(command, cwd=house.ROOT, env=environment, capture_output=True)
        said = defaultdict(list)
        for case in ElementTree.parse(report).iter("testcase"):
            (*_, module) = case.get("classname").split(".")
            said[module.removeprefix("test_")].append(
                "".join(child.get("message", "") for child in case)
            )
    return done.returncode, said


def test_undone_exercises_fail_and_are_no_broken_files() -> None:
    assert run()[0] == pytest.ExitCode.TESTS_FAILED


@every_exercise
def test_an_undone_exercise_fails(slug: str) -> None:
    said = run()[1][slug]
    assert said and all(said), said  # a test that passes asks nothing of the reader
    assert any("NotImplementedError" in message for message in said), said


@every_exercise
def test_a_solution_passes(slug: str) -> None:
    said = run("--solutions")[1][slug]
    assert said and not any(said), said


def test_every_exercise_has_a_stub_a_test_and_a_solution() -> None:
    stubs = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("test_"))
    solutions = sorted(path.stem for path in (FOLDER / "solutions").glob("*.py"))
    assert SLUGS == solutions == [stub for stub in stubs if stub != "conftest"]


def test_one_chapter_sets_each_exercise() -> None:
    chapters = house.chapters()
    assert all(chapter.exercises for chapter in chapters)
    assert Counter(slug for chapter in chapters for slug in chapter.exercises) == Counter(SLUGS)
