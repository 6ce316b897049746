from collections.abc import Iterator

import pytest
from ray_server import RayServer, ray_server


@pytest.fixture(scope="session")
def two_replicas() -> Iterator[RayServer]:
    """On a Ray of their own, which takes its time to start: those who kill some come last."""
    with ray_server("-dp", "2", "--router", "exact", "--seed", "5") as server:
        print(f"two replicas answer after {server.start_seconds:.1f} s")
        yield server
