"""The museum of bugs: every patch still applies, and the test it names fails for its reason."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_pytest import ForkedPytest, forked_pytest

ROOT = Path(__file__).parents[2]
MUSEUM = ROOT / "docs" / "museum"
MOST_LINES = 12  # that a patch adds and takes away: a reader sees a bug at one glance
FEW_RUNS = ["--fuzz-runs", "300"]  # are enough for the bugs that only random runs find
# Without --full: bugs of hashes, hits, eviction, growth, admission, preemption, failing steps and
# packing, whose tests import no torch.
SMALL = {
    *("stale-hash-after-reuse", "hash-without-parent", "hit-covers-the-last-token"),
    *("hit-left-in-the-free-queue", "published-before-computed", "grow-by-remainder"),
    *("prefill-first", "victim-left-in-running", "failed-step-stays-published"),
    "position-off-by-one",
}


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


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and its tests, for a patch to spoil. Bytecode of what is the same stays valid."""
    folder = tmp_path_factory.mktemp("museum")
    for name in ("nanoserve", "tests"):
        ignored = shutil.ignore_patterns("model.safetensors")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture(scope="module")
def runs() -> Iterator[ForkedPytest]:
    with forked_pytest() as runs:
        yield runs


@contextmanager
def applied(patch: Path, copy: Path) -> Iterator[None]:
    """As the reader does it, whether or not `copy` lies inside some repository."""
    (name,) = files_of(patch)
    file = copy / name
    source, stat = file.read_bytes(), file.stat()
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    command = ["git", "apply", str(patch)]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{patch.name} does not fit today's source: {done.stderr}"
    try:
        yield
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def files_of(patch: Path) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text("utf-8"), re.MULTILINE)


def changed_lines(patch: Path) -> list[str]:
    lines = patch.read_text("utf-8").splitlines()
    return [line for line in lines if re.match(r"[+-](?!\+\+ |-- )", line)]


def section_of(exhibit: Exhibit) -> str:
    """What the museum's page says of it."""
    page = (MUSEUM / "index.md").read_text("utf-8")
    assert page.count(f"\n### {exhibit.title}\n") == 1
    return re.split(r"\n##+ ", page.split(f"\n### {exhibit.title}\n")[1])[0]


def test_without_a_patch_all_of_the_named_tests_pass(
    copy: Path, runs: ForkedPytest, by_size: Callable[..., Any]
) -> None:
    slugs = by_size(SMALL, {exhibit.slug for exhibit in EXHIBITS})
    tests = {exhibit.test for exhibit in EXHIBITS if exhibit.slug in slugs}
    status, printed = runs.run(copy, *FEW_RUNS, *sorted(tests))
    assert status == 0, printed


@pytest.mark.small(exhibit=[exhibit for exhibit in EXHIBITS if exhibit.slug in SMALL])
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.slug)
def test_with_the_patch_the_named_test_fails_for_its_reason(
    exhibit: Exhibit, copy: Path, runs: ForkedPytest
) -> None:
    with applied(exhibit.patch, copy):
        status, printed = runs.run(copy, *FEW_RUNS, exhibit.test)
    assert status == 1 and "1 failed" in printed, printed
    assert exhibit.failure in printed, printed


def test_every_patch_is_an_exhibit_and_no_two_are_the_same() -> None:
    slugs = [exhibit.slug for exhibit in EXHIBITS]
    assert SMALL.issubset(slugs)
    assert sorted(slugs) == sorted(path.stem for path in MUSEUM.glob("*.patch"))
    assert len(EXHIBITS) >= 12


def test_a_patch_is_a_few_lines_of_one_file_of_the_package() -> None:
    for exhibit in EXHIBITS:
        files = files_of(exhibit.patch)
        assert len(files) == 1 and files[0].startswith("nanoserve/"), exhibit.slug
        assert 1 <= len(changed_lines(exhibit.patch)) <= MOST_LINES, exhibit.slug


def test_the_page_shows_the_exhibit_and_where_it_comes_from() -> None:
    for exhibit in EXHIBITS:
        section = section_of(exhibit)
        assert f'file("docs/museum/{exhibit.slug}.patch"' in section, exhibit.slug
        assert f"`{exhibit.test}`" in section and exhibit.failure in section, exhibit.slug
        for place in exhibit.origin:
            threads = [f"/{place['repository']}/issues/{number})" for number in place["threads"]]
            for told in [place["repository"], place["commit"] or "", *threads]:
                assert told in section, f"{exhibit.slug}: {told}"
