"""What whoever runs replicas chose for them. Imports nothing of Ray."""

import os
from dataclasses import dataclass
from typing import Any

from nanoserve.utils.checks import check_choice, check_int, check_number, require

ROUTERS = ("approximate", "exact")


@dataclass
class ReplicaSettings:
    """Checked on construction: a `ValueError` names the value."""

    data_parallel_size: int = 1  # replicas, or the fewest of them
    max_data_parallel_size: int | None = None  # the most; None: always as many
    target_ongoing_requests: float = 64  # requests at a replica, above which another one is started
    ray_address: str | None = None  # of a cluster; None: Ray is started here, and stopped again
    router: str = "approximate"  # how it is known what a replica has cached

    def __post_init__(self) -> None:
        number = check_int("data_parallel_size", self.data_parallel_size, 1)
        self.data_parallel_size = number
        if self.max_data_parallel_size is not None:
            most = check_int("max_data_parallel_size", self.max_data_parallel_size, number)
            self.max_data_parallel_size = most
        check_number("target_ongoing_requests", self.target_ongoing_requests, 1)
        check_choice("router", self.router, ROUTERS)
        told = f"ray_address={self.ray_address!r} is for replicas: give data_parallel_size, too"
        require(self.ray_address is None or self.is_fleet, told)

    @property
    def is_fleet(self) -> bool:
        """Whether there is anything to be done with Ray: one engine needs none."""
        return self.data_parallel_size > 1 or self.max_data_parallel_size is not None

    @property
    def num_replicas(self) -> int:
        """That there may be at a time."""
        return self.max_data_parallel_size or self.data_parallel_size


def resources_of(
    options: dict[str, Any], num_replicas: int, num_cores: int, is_cuda: bool
) -> dict[str, float]:
    """What Ray sets aside for each of so many replicas on `num_cores` cores.

    On a CPU each gets its part of the cores, and as many threads: Ray sets OMP_NUM_THREADS. More
    replicas than cores share them. On GPUs each gets one for each of its ranks.
    """
    num_ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if is_cuda:
        return {"num_cpus": 1, "num_gpus": num_ranks}
    num_threads = options.get("num_threads")
    if num_threads is not None:
        return {"num_cpus": num_threads * num_ranks}
    return {"num_cpus": max(1, num_cores // num_replicas)}


def num_cores_here() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
