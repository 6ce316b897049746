import os

# The tests' models are tiny: more threads than one cost more than they bring, and on a machine
# that is busy they wait for each other. Set before torch is imported, and inherited by children.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-runs",
        type=int,
        default=5000,
        help="random runs of the shadow-KV fuzz (20000 is the full size)",
    )
