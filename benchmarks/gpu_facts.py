"""The stage `facts` of gpu_day.py: describes the machine and measures its best rates."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from attention import SIZES, matmul_rate
from gpu_job import Job, Measurements

from nanoserve.cli.bench.hardware import copy_bandwidth, describe, read_bandwidth

_ASKED = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
_ASKED += ",pcie.link.gen.current,pcie.link.width.current"
_PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "safetensors", "xxhash")
_PACKAGES += ("pytest", "pytest-xdist", "flash-attn")
_COPIES = (0.01, 0.3, 2.7, 8.4)  # MB: from the batch of a small step to that of a large one
_NODES = 255  # launches of a decode step of 28 layers, about


def facts(job: Job) -> Measurements:
    yield "machine", lambda: describe(job.device)
    yield "versions", _versions
    sizes = SIZES[job.device]
    yield "copy GB/s", lambda: copy_bandwidth(job.device, sizes.copy_bytes) / 1e9
    yield "read GB/s", lambda: read_bandwidth(job.device, 2**22 if job.is_tiny else 2**32) / 1e9
    yield "matmul TFLOP/s", lambda: matmul_rate(sizes.matmul, job.device) / 1e12
    if job.device == "cuda":
        yield "nvidia-smi", _nvidia_smi
        yield "properties", _properties
        for megabytes in _COPIES:
            yield f"H2D {megabytes} MB us", lambda n=int(megabytes * 1e6): _host_to_device(n)
        yield "eager launch us", _eager_launch
        yield "event round trip us", _event_round_trip
        yield f"graph of {_NODES} nodes", _graph


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"Python": platform.python_version(), "CUDA": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found | {"cores": str(os.cpu_count())}


def _nvidia_smi() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(zip(_ASKED.split(","), shown.splitlines()[0].split(", "), strict=True))


def _properties() -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "capability": f"{gpu.major}.{gpu.minor}",
        "multiprocessors": gpu.multi_processor_count,
        "shared memory per block": getattr(gpu, "shared_memory_per_block_optin", None),
        "L2 bytes": gpu.L2_cache_size,
        "GPUs": torch.cuda.device_count(),
    }


def _median_us(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _host_to_device(num_bytes: int) -> float:
    """Time copies from page-locked memory, including the waiting."""
    source = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return _median_us(copy, 20)


def _eager_launch() -> float:
    """Return the host's time for one small operation of torch."""
    x, repeats = torch.zeros(1000, device="cuda"), 1000
    x.add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        x.add_(1)
    return (time.perf_counter() - start) / repeats * 1e6


def _event_round_trip() -> float:
    event = torch.cuda.Event()

    def there_and_back() -> None:
        event.record()
        event.synchronize()

    return _median_us(there_and_back, 100)


def _graph() -> dict[str, float]:
    x, repeats = torch.zeros(1000, device="cuda"), 20
    x.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_NODES):
            x.add_(1)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    host = (launched - start) / repeats * 1e6
    return {"launch us": host, "us per node": whole / repeats / _NODES * 1e6}
