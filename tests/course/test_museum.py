"""The museum of bugs: every patch still applies, and the test it names fails for its reason."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MUSEUM = ROOT / "docs" / "museum"
MOST_LINES = 12  # that a patch adds and takes away: a reader sees a bug at one glance
# In one process and without plugins, whose import takes longer than most of the tests. Few random
# runs are enough for the bugs that only random runs find. The import mode is the project's own.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider"]
PYTEST += ["--import-mode=importlib"]
FEW_RUNS = ["--fuzz-runs", "300"]
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONUTF8": "1"}


@dataclass(frozen=True)
class Exhibit:
    slug: str
    title: str
    origin: list[dict[str, Any]]  # repository, threads and commit; empty if no engine is on record
    symptom: str
    test: str
    failure: str  # what the failing test prints

    @property
    def patch(self) -> Path:
        return MUSEUM / f"{self.slug}.patch"


EXHIBITS = [Exhibit(**entry) for entry in json.loads((MUSEUM / "exhibits.json").read_text("utf-8"))]
each_exhibit = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.slug)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its tests, for a patch to spoil."""
    ignored = shutil.ignore_patterns("__pycache__", "model.safetensors")
    for folder in ("nanoserve", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run_tests(copy: Path, tests: set[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(copy), "COLUMNS": "100"}
    return subprocess.run(
        [*PYTEST, *FEW_RUNS, *sorted(tests)],
        cwd=copy,
        env=environment,
        capture_output=True,
        encoding="utf-8",
    )


def apply(copy: Path, patch: Path) -> None:
    """As the reader does it, whether or not `copy` lies inside some repository."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    command = ["git", "apply", str(patch)]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name} does not fit today's source: {done.stderr}"


def changed_lines(patch: Path) -> list[str]:
    lines = patch.read_text("utf-8").splitlines()
    return [line for line in lines if re.match(r"[+-](?!\+\+ |-- )", line)]


def section_of(exhibit: Exhibit) -> str:
    """What the museum's page says of it."""
    page = (MUSEUM / "index.md").read_text("utf-8")
    assert page.count(f"\n### {exhibit.title}\n") == 1
    return re.split(r"\n##+ ", page.split(f"\n### {exhibit.title}\n")[1])[0]


def test_without_a_patch_all_of_the_named_tests_pass(copy: Path) -> None:
    done = run_tests(copy, {exhibit.test for exhibit in EXHIBITS})
    assert done.returncode == 0, done.stdout


@each_exhibit
def test_with_the_patch_the_named_test_fails_for_its_reason(exhibit: Exhibit, copy: Path) -> None:
    apply(copy, exhibit.patch)
    done = run_tests(copy, {exhibit.test})
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout
    assert exhibit.failure in done.stdout, done.stdout


def test_every_patch_is_an_exhibit_and_no_two_are_the_same() -> None:
    slugs = [exhibit.slug for exhibit in EXHIBITS]
    assert sorted(slugs) == sorted(path.stem for path in MUSEUM.glob("*.patch"))
    assert len(EXHIBITS) >= 12


@each_exhibit
def test_a_patch_is_a_few_lines_of_one_file_of_the_package(exhibit: Exhibit) -> None:
    files = re.findall(r"^\+\+\+ b/(\S+)$", exhibit.patch.read_text("utf-8"), re.MULTILINE)
    assert len(files) == 1 and files[0].startswith("nanoserve/")
    assert 1 <= len(changed_lines(exhibit.patch)) <= MOST_LINES


@each_exhibit
def test_the_page_shows_the_exhibit_and_where_it_comes_from(exhibit: Exhibit) -> None:
    section = section_of(exhibit)
    assert f'file("docs/museum/{exhibit.slug}.patch"' in section
    assert f"`{exhibit.test}`" in section and exhibit.failure in section
    for place in exhibit.origin:
        threads = [f"/{place['repository']}/issues/{number})" for number in place["threads"]]
        for told in [place["repository"], place["commit"] or "", *threads]:
            assert told in section, told
