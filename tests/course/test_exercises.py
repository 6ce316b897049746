"""The course's exercises: undone they fail, solved they pass, and each chapter sets its own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import facts
import pytest
from inner_pytest import run_inner

CHAPTERS = facts.chapters()
FOLDERS = {chapter.folder.name: chapter.folder for chapter in CHAPTERS}
every_chapter = pytest.mark.parametrize("chapter", FOLDERS)


def run(chapter: str, first_cases_only: bool, *options: str) -> tuple[int, list[str]]:
    """pytest's exit status, and what the tests of a chapter said: "" of those that passed."""
    test = FOLDERS[chapter] / "test_exercise.py"
    status, said = run_inner([test], *options, first_cases_only=first_cases_only)
    return status, said[test.stem]


@every_chapter
def test_an_undone_exercise_fails(chapter: str, by_size: Callable[..., Any]) -> None:
    status, said = run(chapter, by_size(True, False))
    assert status == pytest.ExitCode.TESTS_FAILED  # it is no broken file
    assert said and all(said), said  # a test that passes asks nothing of the reader
    assert any("NotImplementedError" in message for message in said), said


@pytest.mark.small(chapter=[name for name in FOLDERS if name != "13-request-life"])  # an engine
@every_chapter
def test_a_solution_passes(chapter: str, by_size: Callable[..., Any]) -> None:
    status, said = run(chapter, by_size(True, False), "--solutions")
    assert status == pytest.ExitCode.OK
    assert said and not any(said), said


@pytest.mark.size("full")
def test_undone_exercises_fail_and_are_no_broken_files() -> None:
    """As the reader runs them: without what this suite's conftest sets for itself."""
    own = ("PYTEST_", "TRITON_INTERPRET")
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(own)}
    # All files are imported before the first test fails; one that cannot be is another status.
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    undone = [str(folder / "test_exercise.py") for folder in FOLDERS.values()]
    solved = [str(FOLDERS["13-request-life"] / "test_exercise.py"), "--solutions"]
    for tests, status in (
        (undone, pytest.ExitCode.TESTS_FAILED),
        (solved, pytest.ExitCode.OK),
    ):
        done = subprocess.run([*command, *tests], cwd=facts.ROOT, env=environment)
        assert done.returncode == status, tests


def test_every_exercise_has_a_stub_a_test_and_a_solution() -> None:
    for name in ("exercise.py", "test_exercise.py", "solution.py"):
        expected = [chapter.folder / name for chapter in CHAPTERS]
        assert sorted(facts.DOCS.glob(f"[0-9]*/{name}")) == expected


def test_one_chapter_sets_each_exercise() -> None:
    for chapter in CHAPTERS:
        commands = re.findall(r"pytest -x docs/([\w-]+)/test_exercise\.py", chapter.text)
        assert commands == [chapter.folder.name]
        stub = (chapter.folder / "exercise.py").read_text(encoding="utf-8")
        assert f"pytest -x docs/{chapter.folder.name}/test_exercise.py" in stub
