"""Sets the number of CPU threads, which is in effect only while the engine itself computes."""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch

# A model of fewer bytes gets one thread. Reading it takes less time than waking a second thread for
# each of a few hundred matmuls, and on a machine with other work, threads that wait for each other
# take a hundred times as long.
SMALL_MODEL_BYTES = 2**26


def choose_num_threads(requested: int | None, weight_bytes: int) -> int:
    """Return the number of threads for a model of `weight_bytes`.

    `requested` takes precedence, up to the number of cores.
    """
    if requested is not None:
        return min(requested, os.cpu_count() or requested)
    return 1 if weight_bytes < SMALL_MODEL_BYTES else torch.get_num_threads()


@contextlib.contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """Use `num_threads` threads in torch and numba; then restore torch's own number."""
    before = torch.get_num_threads()
    set_num_threads(num_threads)
    try:
        yield
    finally:
        set_num_threads(before)


def set_num_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    if "numba" in sys.modules:
        numba = sys.modules["numba"]
        numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
        # Starting numba's threads sets OpenMP's number, which is torch's too, to all cores.
        torch.set_num_threads(num_threads)
