"""Weights in the order in which oneDNN's matrix products read them: bfloat16 on a CPU.

Processors that multiply bfloat16 (AVX-512 BF16, AMX) want pairs of rows of a weight side by side.
Given a plain weight, oneDNN rearranges it in every product; here it is done once, after loading.

The operators are those that torch.compile itself uses for frozen weights. They are private to
torch, so `works` tries them.
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
_MADV_COLLAPSE = 25  # of Linux 6.1; Python has no name for it


@functools.cache
def works() -> bool:
    """Whether torch has the operators and this processor the instructions."""
    weight = torch.arange(48, dtype=torch.bfloat16).view(6, 8)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    try:
        return torch.equal(linear(x, pack(weight)), F.linear(x, weight))
    except (AttributeError, RuntimeError) as error:
        logger.info("no packed weights with this processor and torch: %s", error)
        return False


def pack(weight: Tensor) -> Tensor:
    """bfloat16 [outputs, inputs] -> what `linear` takes."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # None: for any number of rows
    _use_large_pages(*memory(packed))
    return packed


def linear(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def memory(packed: Tensor) -> tuple[int, int]:
    """Address and number of bytes of what was packed; nothing, of a torch that does not tell."""
    try:
        return torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
    except AttributeError:
        return 0, 0


def bytes_at(address: int, num_bytes: int) -> Tensor:
    """uint8 [num_bytes], a copy."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, num_bytes)), dtype=torch.uint8)


def _use_large_pages(start: int, size: int) -> None:
    """A step reads all weights once, and looking up their small pages takes 4 % of its time.

    oneDNN allocates what it packs, so it can be asked for only afterwards, by address. Linux then
    copies what lies there, once. It is free to refuse.
    """
    if sys.platform != "linux" or size < _LARGE_PAGE:
        return
    first = start - start % _LARGE_PAGE
    length = start + size + -(start + size) % _LARGE_PAGE - first
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_COLLAPSE)
