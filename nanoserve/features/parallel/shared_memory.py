"""Anonymous memory shared by several processes: the system frees it after the last of them."""

import mmap
import os
import tempfile

import numpy as np


def map_memory(fd: int, num_bytes: int) -> np.ndarray:
    """Return the file's bytes as uint8 [num_bytes], shared with every process that maps them."""
    return np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)


def anonymous_file() -> int:
    """Return a file descriptor of anonymous memory, freed when the last process closes it."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("nanoserve")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
