"""Memory that several processes have, without a name: it is gone with the last of them."""

import mmap
import os
import tempfile

import numpy as np


def map_memory(fd: int, num_bytes: int) -> np.ndarray:
    """The file's bytes as uint8 [num_bytes], shared with every process that maps them."""
    return np.frombuffer(mmap.mmap(fd, num_bytes), dtype=np.uint8)


def anonymous_file() -> int:
    """A descriptor of memory that has no name, and is gone with the last process that holds it."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("nanoserve")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
