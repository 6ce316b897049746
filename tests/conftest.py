import os

# The tests' models are tiny: more threads than one cost more than they bring, and on a machine
# that is busy they wait for each other. Set before torch is imported, and inherited by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import interpreter
import pytest
import sizes
from gpu_run import is_gpu_run


def pytest_addoption(parser: pytest.Parser) -> None:
    sizes.add_options(parser)
    parser.addoption(
        "--fuzz-runs",
        type=int,
        help="random runs of the shadow-KV fuzz (by default 300, with --full 2000, --soak 20000)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process for a GPU, because the tests measure its memory."""
    return 0 if is_gpu_run(config.option.markexpr) or config.option.list_sizes else None


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -m gpu` runs on the GPU, and only what is made for it; all else runs without one.

    So does every other expression that selects nothing else: `-m "gpu and not slow"`.

    The kernels then run in Triton's interpreter, which must be chosen before they are imported.
    """
    config.pluginmanager.register(sizes, "sizes")
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # So a shell starts what it puts in the background; tests of Ctrl-C would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not is_gpu_run(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter.prepare()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3, the same one for every test that does not care which."""
    from tiny_checkpoints import make_qwen3  # imports torch, which tests of the engine do without

    path = tmp_path_factory.mktemp("qwen3")
    make_qwen3(path)
    return path


def pytest_collection_finish() -> None:
    """What the imports have left stays to the end: no collection of garbage looks at it again.

    Half a million objects are a fifth of a second for each of them, and engines ask for many.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter collect everything as it ends: libraries report what is left then."""
    gc.unfreeze()


T = TypeVar("T")


@pytest.fixture(scope="session")
def by_size(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Choose a count of runs, prompts or rounds by the size of the run: `by_size(8, 100, 1000)`.

    A test that uses it, or `full_size`, is run again by `--only-full`.
    """
    size = sizes.size_of_run(request.config)

    def choose(small: T, full: T, soak: T | None = None) -> T:
        return (small, full, full if soak is None else soak)[size]

    return choose


@pytest.fixture(scope="session")
def full_size(by_size: Callable[..., Any]) -> bool:
    """Return whether every case runs, as in CI."""
    return by_size(False, True)


@pytest.fixture
def fuzz_runs(request: pytest.FixtureRequest, by_size: Callable[..., Any]) -> int:
    return request.config.getoption("--fuzz-runs") or by_size(300, 2000, 20000)
