"""bfloat16 weights packed for oneDNN's matrix products on a CPU.

Processors that multiply bfloat16 (AVX-512 BF16, AMX) need pairs of rows of a weight side by side.
Without packing, oneDNN repacks the weight in every product; here it is packed once, after loading.

torch.compile uses the same operators for frozen weights. They are private to torch, so `works`
tries them.
"""

import ctypes
import functools
import logging
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

_LARGE_PAGE = 2**21
_MADV_COLLAPSE = 25  # since Linux 6.1; the mmap module does not define it


@functools.cache
def works() -> bool:
    """Return True if torch has the operators and this processor has the instructions."""
    weight = torch.arange(48, dtype=torch.bfloat16).view(6, 8)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    try:
        return torch.equal(linear(x, pack(weight)), F.linear(x, weight))
    except (AttributeError, RuntimeError) as error:
        logger.info("packed weights are not available on this processor with this torch: %s", error)
        return False


def pack(weight: Tensor) -> Tensor:
    """Pack bfloat16 [outputs, inputs] for `linear`."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # None: for any number of rows
    _use_large_pages(*memory(packed))
    return packed


def linear(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def memory(packed: Tensor) -> tuple[int, int]:
    """Return the address and bytes of a packed weight; (0, 0) if torch does not expose them."""
    try:
        return torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except AttributeError:
        return 0, 0


def bytes_at(address: int, num_bytes: int) -> Tensor:
    """Return a copy of the memory at `address`, uint8 [num_bytes]."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, num_bytes)), dtype=torch.uint8)


def _use_large_pages(start: int, size: int) -> None:
    """Move memory to large pages: a step reads all weights, and TLB misses take 4 % of its time.

    oneDNN allocates the packed weight, so large pages can be requested only afterwards, by address.
    Linux then copies the contents once. It may reject the request.
    """
    if sys.platform != "linux" or size < _LARGE_PAGE:
        return
    first = start - start % _LARGE_PAGE
    length = start + size + -(start + size) % _LARGE_PAGE - first
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_COLLAPSE)
