"""pytest and scripts within a test: in this process, where torch is imported already.

What they leave is taken back, so that each begins as in a process of its own: modules of the
course, import hooks, environment.
"""

import io
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from traceback import print_exc

import facts
import pytest

# No other plugin, no other process, and no rewriting of assertions, which takes longer than most
# of the tests; the import mode is the project's own.
OPTIONS = ["-q", "--tb=line", "-s", "--assert=plain", "-o", "addopts=", "--import-mode=importlib"]
# Of these, two write to files or file descriptors of the outer run, and one collects garbage.
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:unraisableexception"]


class Recorder:
    """Keeps what each test said: "" if it passed."""

    def __init__(self, first_cases_only: bool) -> None:
        self.said: dict[str, list[str]] = defaultdict(list)
        self.failed: list[tuple[str, str]] = []  # test function, message
        self._first_cases_only = first_cases_only

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._first_cases_only:
            firsts = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
            items[:] = reversed(firsts.values())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._keep(report, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._keep(report, crash.message if crash else str(report.longrepr))
        elif report.when == "call":
            self._keep(report, "")

    def _keep(self, report: pytest.CollectReport | pytest.TestReport, message: str) -> None:
        file = report.nodeid.partition("::")[0]
        self.said[Path(file).stem].append(message)
        if message:
            name = report.nodeid.rpartition("::")[2].partition("[")[0]
            self.failed.append((name, message))


@contextmanager
def _as_in_a_new_process(packages: set[str], **variables: str) -> Iterator[None]:
    """Inside, none of the packages is imported yet; afterwards all is as it was."""

    def ours() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in packages]

    before = {name: sys.modules.pop(name) for name in ours()}
    hooks, path, environment = [*sys.meta_path], [*sys.path], dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules |= before
        sys.meta_path[:], sys.path[:] = hooks, path
        os.environ.clear()
        os.environ |= environment


def run_inner(
    tests: list[Path], *options: str, root: Path = facts.ROOT, first_cases_only: bool = False
) -> tuple[int, dict[str, list[str]]]:
    """pytest's exit status, and by the name of each file what its tests said: "" of who passed.

    first_cases_only: of each test function only the first of its cases.
    """
    recorder = Recorder(first_cases_only)
    return _run(recorder, tests, *options, root=root), recorder.said


def first_failure(test: Path, root: Path) -> tuple[str, str]:
    """The first test of a file that fails, as the reader sees it with `-x`, and its message."""
    recorder = Recorder(first_cases_only=False)
    _run(recorder, [test], "-x", root=root)
    return recorder.failed[0] if recorder.failed else ("", "")


def _run(recorder: Recorder, tests: list[Path], *options: str, root: Path) -> int:
    output = io.StringIO()
    where = ["-c", str(facts.ROOT / "pyproject.toml"), f"--rootdir={root}"]
    arguments = [*OPTIONS, *where, *map(str, tests), *options]
    packages = {test.relative_to(root).parts[0] for test in tests}
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    with _as_in_a_new_process(packages, **alone), redirect_stdout(output):
        status = pytest.main(arguments, plugins=[recorder])
    print(output.getvalue())
    return int(status)


def run_script(script: Path, *arguments: str) -> "CompletedProcess[str]":
    """`python script arguments`, with what it printed, as `subprocess.run` returns it."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    siblings = {file.stem for file in script.parent.glob("*.py")}
    argv, sys.argv = sys.argv, [str(script), *arguments]
    try:
        with _as_in_a_new_process(siblings), redirect_stdout(out), redirect_stderr(err):
            sys.path.insert(0, str(script.parent))
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    except Exception:
        status = 1
        print_exc(file=err)
    finally:
        sys.argv = argv
    return CompletedProcess(sys.argv, status, out.getvalue(), err.getvalue())
