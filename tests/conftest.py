import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-runs",
        type=int,
        default=5000,
        help="random runs of the shadow-KV fuzz (20000 is the full size)",
    )
