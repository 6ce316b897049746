"""Settings of data parallel replicas. Does not import Ray."""

import os
from dataclasses import dataclass
from typing import Any

from nanoserve.utils.checks import check_choice, check_int, check_number, require

ROUTERS = ("approximate", "exact")


@dataclass
class ReplicaSettings:
    """Settings of replicas, validated on construction. A `ValueError` names the wrong value."""

    data_parallel_size: int = 1  # number of replicas; the minimum if there is a maximum
    max_data_parallel_size: int | None = None  # maximum number of replicas; None: a fixed number
    target_ongoing_requests: float = (
        64  # requests per replica above which another replica is started
    )
    ray_address: str | None = None  # of a cluster; None: start Ray here, and stop it at the end
    router: str = "approximate"  # how the router tracks the cached blocks of replicas

    def __post_init__(self) -> None:
        number = check_int("data_parallel_size", self.data_parallel_size, 1)
        self.data_parallel_size = number
        if self.max_data_parallel_size is not None:
            most = check_int("max_data_parallel_size", self.max_data_parallel_size, number)
            self.max_data_parallel_size = most
        check_number("target_ongoing_requests", self.target_ongoing_requests, 1)
        check_choice("router", self.router, ROUTERS)
        message = f"ray_address={self.ray_address!r} requires replicas; set data_parallel_size, too"
        require(self.ray_address is None or self.is_fleet, message)

    @property
    def is_fleet(self) -> bool:
        """True if Ray is needed, i.e. for more than a single engine."""
        return self.data_parallel_size > 1 or self.max_data_parallel_size is not None

    @property
    def num_replicas(self) -> int:
        """The maximum number of replicas at a time."""
        return self.max_data_parallel_size or self.data_parallel_size


def resources_of(
    options: dict[str, Any], num_replicas: int, num_cores: int, is_cuda: bool
) -> dict[str, float]:
    """Return the Ray resources of each of `num_replicas` replicas on `num_cores` cores.

    On CPUs, each replica gets an equal part of the cores, at least one, and as many threads,
    because Ray sets OMP_NUM_THREADS. On GPUs, each replica gets one GPU per rank.
    """
    num_ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if is_cuda:
        return {"num_cpus": 1, "num_gpus": num_ranks}
    num_threads = options.get("num_threads")
    if num_threads is not None:
        return {"num_cpus": num_threads * num_ranks}
    return {"num_cpus": max(1, num_cores // num_replicas)}


def num_cores_here() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
