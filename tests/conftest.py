import os

# The tests' models are tiny: more threads than one cost more than they bring, and on a machine
# that is busy they wait for each other. Set before torch is imported, and inherited by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-runs",
        type=int,
        default=5000,
        help="random runs of the shadow-KV fuzz (20000 is the full size)",
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3, the same one for every test that does not care which."""
    from tiny_checkpoints import make_qwen3  # imports torch, which the brain's tests do without

    path = tmp_path_factory.mktemp("qwen3")
    make_qwen3(path)
    return path
