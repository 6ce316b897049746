"""The course's exercises: undone they fail, solved they pass, and each chapter sets its own."""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import facts
import pytest

CHAPTERS = facts.chapters()
TESTS = [chapter.folder / "test_exercise.py" for chapter in CHAPTERS]
every_chapter = pytest.mark.parametrize("chapter", [chapter.folder.name for chapter in CHAPTERS])


@cache
def run(*options: str) -> tuple[int, dict[str, list[str]]]:
    """pytest's exit status, and for each chapter what its tests said: "" if they passed."""
    # As the reader has it: without what this suite's conftest sets for itself.
    own = ("PYTEST_", "TRITON_INTERPRET")
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(own)}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *map(str, TESTS), *options]
        done = subprocess.run(command, cwd=facts.ROOT, env=environment, capture_output=True)
        said = defaultdict(list)
        for case in ElementTree.parse(report).iter("testcase"):
            (*_, chapter, _) = case.get("classname").split(".")
            said[chapter].append("".join(child.get("message", "") for child in case))
    return done.returncode, said


def test_undone_exercises_fail_and_are_no_broken_files() -> None:
    assert run()[0] == pytest.ExitCode.TESTS_FAILED


@every_chapter
def test_an_undone_exercise_fails(chapter: str) -> None:
    said = run()[1][chapter]
    assert said and all(said), said  # a test that passes asks nothing of the reader
    assert any("NotImplementedError" in message for message in said), said


@every_chapter
def test_a_solution_passes(chapter: str) -> None:
    said = run("--solutions")[1][chapter]
    assert said and not any(said), said


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
