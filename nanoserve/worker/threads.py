"""How many threads compute on a CPU, and that only an engine's own work is given so many."""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch

# A model of fewer bytes gets one thread. It is read in less time than it takes to wake another for
# each of some hundred products, and beside other work on the machine to wait for each other costs
# a hundredfold of that.
SMALL_MODEL_BYTES = 2**26


def choose_num_threads(asked: int | None, weight_bytes: int) -> int:
    """Of a model of so many bytes; what is asked for wins, up to the cores that there are."""
    if asked is not None:
        return min(asked, os.cpu_count() or asked)
    return 1 if weight_bytes < SMALL_MODEL_BYTES else torch.get_num_threads()


@contextlib.contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """torch and numba use so many; afterwards torch has its own number again."""
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
        # To start numba's threads sets the number of OpenMP's, torch's too, to all.
        torch.set_num_threads(num_threads)
