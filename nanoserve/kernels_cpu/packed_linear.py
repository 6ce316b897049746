"""Weights in the order in which oneDNN's matrix products read them: bfloat16 on a CPU.

Processors that multiply bfloat16 (AVX-512 BF16, AMX) want pairs of rows of a weight side by side.
Given a plain weight, oneDNN rearranges it in every product; here it is done once, after loading.

The two operators are those that torch.compile itself uses for frozen weights. They are private to
torch, so `packed_linear_method` tries them, and without them weights stay as they are.
"""

import contextlib
import ctypes
import logging
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.layers.context import LinearMethod
from nanoserve.layers.linear import UnquantizedLinearMethod

logger = logging.getLogger(__name__)

_LARGE_PAGE = 2**21
_MADV_COLLAPSE = 25  # of Linux 6.1; Python has no name for it


class PackedLinearMethod(UnquantizedLinearMethod):
    """A tied LM head gets a packed copy of its own: the embedding needs plain rows."""

    def process_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(_pack(layer.weight.data), requires_grad=False)
        _use_large_pages(layer.weight)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return _linear(x, layer.weight)


def packed_linear_method() -> LinearMethod | None:
    """A `PackedLinearMethod` if torch has its operators and they work here, or None."""
    weight = torch.arange(48, dtype=torch.bfloat16).view(6, 8)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    try:
        works = torch.equal(_linear(x, _pack(weight)), F.linear(x, weight))
    except (AttributeError, RuntimeError) as error:
        logger.info("no packed weights with this processor and torch: %s", error)
        return None
    return PackedLinearMethod() if works else None


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)  # None: for any number of rows


def _linear(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _use_large_pages(packed: Tensor) -> None:
    """A step reads all weights once, and looking up their small pages takes 4 % of its time.

    oneDNN allocates what it packs, so it can be asked for only afterwards, by address. Linux then
    copies what lies there, once. It is free to refuse.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # a torch that does not tell the address
        start = torch.ops.mkldnn.data_ptr(packed)
        size = torch.ops.mkldnn._nbytes(packed)
        if size < _LARGE_PAGE:
            return
        first = start - start % _LARGE_PAGE
        length = start + size + -(start + size) % _LARGE_PAGE - first
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_COLLAPSE)
