import os

# The tests' models are tiny: more threads than one cost more than they bring, and on a machine
# that is busy they wait for each other. Set before torch is imported, and inherited by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import itertools
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import interpreter
import pytest
from gpu_run import is_gpu_run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="every case at full size, as in CI; without it, each behaviour at least once",
    )
    parser.addoption(
        "--only-full",
        action="store_true",
        help="of --full, only what a run without it leaves out or does at a smaller size",
    )
    parser.addoption(
        "--fuzz-runs",
        type=int,
        help="random runs of the shadow-KV fuzz (by default 500, with --full 5000)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process for a GPU, because the tests measure its memory."""
    return 0 if is_gpu_run(config.option.markexpr) else None


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -m gpu` runs on the GPU, and only what is made for it; all else runs without one.

    So does every other expression that selects nothing else: `-m "gpu and not slow"`.

    The kernels then run in Triton's interpreter, which must be chosen before they are imported.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # So a shell starts what it puts in the background; tests of Ctrl-C would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not is_gpu_run(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter.prepare()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3, the same one for every test that does not care which."""
    from tiny_checkpoints import make_qwen3  # imports torch, which the brain's tests do without

    path = tmp_path_factory.mktemp("qwen3")
    make_qwen3(path)
    return path


# ---------------------------------------------------------------- two sizes of one suite


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if _is_full(config) else "small size; --full runs every case, at full size"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not of the size; but a case that the command line names is wanted."""
    if config.getoption("--only-full"):
        wanted = [not _runs_small(item) or "full_size" in item.fixturenames for item in items]
    else:
        wanted = [_is_full(config) or _runs_small(item) for item in items]
    kept, left_out = [], []
    for item, is_wanted in zip(items, wanted, strict=True):
        is_named = any(name.endswith(item.nodeid) for name in config.args)
        (kept if is_wanted or is_named else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def pytest_collection_finish() -> None:
    """What the imports have left stays to the end: no collection of garbage looks at it again.

    Half a million objects are a fifth of a second for each of them, and engines ask for many.
    """
    gc.collect()
    gc.freeze()


def _is_full(config: pytest.Config) -> bool:
    """A GPU is quick enough for everything that is made for it."""
    options = config.option
    return options.full or options.only_full or is_gpu_run(options.markexpr)


def _runs_small(item: pytest.Item) -> bool:
    parameters = [mark.kwargs.items() for mark in item.iter_markers("small")]
    return all(
        item.callspec.params[name] in values for name, values in itertools.chain(*parameters)
    )


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """pytest-xdist does not say what its processes deselect, so they tell it themselves."""
    if items and (output := getattr(items[0].config, "workeroutput", None)) is not None:
        output["num_deselected"] = output.get("num_deselected", 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process has ended; all of them deselect the same."""
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    num_deselected = getattr(node, "workeroutput", {}).get("num_deselected", 0)
    reporter.stats["deselected"] = [None] * num_deselected


@pytest.fixture(scope="session")
def full_size(request: pytest.FixtureRequest) -> bool:
    """Whether counts are those of CI: so many runs, prompts, rounds; else what shows a behaviour.

    What asks for it is run again by `--only-full`.
    """
    return _is_full(request.config)


@pytest.fixture
def fuzz_runs(request: pytest.FixtureRequest, full_size: bool) -> int:
    return request.config.getoption("--fuzz-runs") or (5000 if full_size else 500)
