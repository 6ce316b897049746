"""Measure the memory bandwidth and the matmul rate of this machine, and name its hardware."""

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

_IN_A_ROW = 8  # runs on a GPU, so that launching and waiting are negligible
_LONG_ENOUGH = 0.05  # seconds of one product, so that overheads are negligible


def choose_device(device: str) -> str:
    """Return "cpu" or "cuda". "auto" selects a GPU if there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def copy_bandwidth(device: str, num_bytes: int = 2**28) -> float:
    """Return the bytes per second that a large copy reads and writes, the median of five."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(_times(lambda: target.copy_(source), device))


def read_bandwidth(device: str, num_bytes: int = 2**30) -> float:
    """Return the bytes per second at which a matrix is read for a product with a vector, or a sum.

    Weights and KV are mostly read, and no engine may exceed the limit: hence the best of several
    measurements, with a matrix that is larger than any cache.
    """
    matrix = torch.ones(num_bytes // 4 // 4096, 4096, dtype=torch.float32, device=device)
    vector = matrix[0].clone()
    ways: tuple[Callable[[], object], ...] = (lambda: matrix @ vector, matrix.sum)
    return num_bytes / min(min(_times(way, device)) for way in ways)


def form_rate(make: Callable[[torch.Tensor], Callable], weight: torch.Tensor) -> float:
    """Return the operations per second of a CPU's product of 512 rows and a weight.

    make: converts the weight to the form of a kernel, and returns the product with it.
    """
    form, num_rows = make(weight), 512
    x = torch.randn(num_rows, weight.shape[1]).to(weight.dtype)
    return 2 * num_rows * weight.numel() / min(_times(lambda: form(x), "cpu"))


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Return the operations per second of large matrix products, the best over growing sizes."""
    best, n, seconds = 0.0, 512, 0.0
    while seconds < _LONG_ENOUGH and n < 8192:
        n *= 2
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        seconds = min(_times(partial(torch.matmul, a, b), device))
        best = max(best, 2 * n**3 / seconds)
    return best


def _times(run: Callable[[], object], device: str) -> list[float]:
    """Return the seconds of a run, measured five times after a warm-up."""
    repeats, times = 1 if device == "cpu" else _IN_A_ROW, []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return times[1:]


def set_threads(num_threads: int | None) -> None:
    """Set the number of threads of torch, and of numba if it is imported.

    Call it again after an import of numba.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
        if "numba" in sys.modules:
            numba = sys.modules["numba"]
            numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


def describe(device: str) -> str:
    name = f"{_cpu_model()}, {os.cpu_count()} cores"
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        name += f"; {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return name


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return models[0] if models else "unknown CPU"
