import os

# The tests' models are tiny: more threads than one cost more than they bring, and on a machine
# that is busy they wait for each other. Set before torch is imported, and inherited by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-runs",
        type=int,
        default=5000,
        help="random runs of the shadow-KV fuzz (20000 is the full size)",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process for a GPU, because the tests measure its memory."""
    return 0 if config.option.markexpr.strip() == "gpu" else None


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -m gpu` runs on the GPU, and only what is made for it; all else runs without one.

    The kernels then run in Triton's interpreter, which must be chosen before they are imported.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # So a shell starts what it puts in the background; tests of Ctrl-C would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.markexpr.strip() != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
        _mend_interpreter()


def _mend_interpreter() -> None:
    """Triton 3.6 takes `int` of an array with one element, which numpy 2.4 no longer does."""
    if find_spec("triton") is None or not version("triton").startswith("3.6."):
        return
    import triton.runtime.interpreter as interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_and_mend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3, the same one for every test that does not care which."""
    from tiny_checkpoints import make_qwen3  # imports torch, which the brain's tests do without

    path = tmp_path_factory.mktemp("qwen3")
    make_qwen3(path)
    return path
