"""Work of a kernel that is split over programs, and how their partial results become one.

Each program stores its part and counts its arrival. The program that arrives last has all parts at
hand, so that neither does a program wait for another, nor is a second kernel needed.
"""

import functools

import torch
import triton
import triton.language as tl

PROGRAMS = 2  # per multiprocessor, at most


@functools.cache
def num_multiprocessors(device: torch.device, without_gpu: int = 132) -> int:
    """Return the number of a GPU's multiprocessors; for another device `without_gpu`, an H100's."""
    if device.type != "cuda":
        return without_gpu
    return torch.cuda.get_device_properties(device).multi_processor_count


def most_arrivals(device: torch.device) -> int:
    """Return the number of counters that suffices for every launch on a device."""
    return PROGRAMS * num_multiprocessors(device)


def check_arrivals(arrivals: torch.Tensor, least: int) -> None:
    """Raise `ValueError` unless `arrivals` are at least so many counters."""
    if arrivals.dtype != torch.int32 or arrivals.ndim != 1 or len(arrivals) < least:
        raise ValueError(
            f"arrivals must be int32 [{least}] or longer, not {arrivals.dtype} "
            f"{list(arrivals.shape)}"
        )


class Arrivals:
    """Counters of arrivals, for kernels that are launched on one stream: each leaves them zero."""

    def __init__(self) -> None:
        self._counters: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the counters, int32 [`most_arrivals`].

        They are allocated by the first launch, which runs before any CUDA graph is captured.
        """
        if self._counters is None:
            self._counters = torch.zeros(most_arrivals(device), dtype=torch.int32, device=device)
        return self._counters


@triton.jit
def arrives_last(arrivals, num_programs):
    """Count the arrival of this program; return True if it is the last of `num_programs`.

    That program sees what the others have stored if it loads it from the L2 cache (".cg"), and has
    to reset the counter.
    """
    tl.debug_barrier()  # all threads have stored their part
    return tl.atomic_add(arrivals, 1, sem="acq_rel") == num_programs - 1
