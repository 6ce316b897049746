"""Memory of a CPU for what is large and read as a whole: weights, the KV cache."""

import ctypes
import mmap
import sys
from contextlib import suppress

import torch


def map_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zero, of which a page is mapped when it is first used.

    On large pages where the system has them: to look up small ones takes a decode step 4 % of its
    time, and scattered KV blocks an eighth.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    # Private: by default Python maps shared memory, which Linux hardly ever puts on large pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def give_back_freed() -> None:
    """Give the system what the C library's heap has free, where that is glibc's.

    It keeps what lies below anything in use. After weights of a few megabytes have been made
    integers one by one, that was 320 MB for Qwen3-0.6B.
    """
    if sys.platform != "linux":
        return
    with suppress(AttributeError):  # another C library: musl has nothing to trim
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
