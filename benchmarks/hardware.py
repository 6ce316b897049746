"""What a measurement was made on: the machine's name, and the speed of its memory."""

import os
import statistics
import time
from pathlib import Path

import torch

_COPIES = 8  # in a row, so that starting and waiting weigh little


def choose_device(asked: str) -> str:
    """ "cpu" or "cuda"; "auto" is a GPU if there is one."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def copy_bandwidth(device: str, num_bytes: int = 2**28) -> float:
    """Bytes per second that a large copy reads and writes, median of five."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(6):  # the first one sets up
        start = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return _COPIES * 2 * num_bytes / statistics.median(times[1:])


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
