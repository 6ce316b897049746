"""Weights in the order in which oneDNN's matrix products read them: bfloat16 on a CPU.

Processors that multiply bfloat16 (AVX-512 BF16, AMX) want pairs of rows of a weight side by side.
Given a plain weight, oneDNN rearranges it in every product; here it is done once, after loading.

The two operators are those that torch.compile itself uses for frozen weights. They are private to
torch, so `packed_linear_method` tries them, and without them weights stay as they are.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.layers.linear import LinearMethod, UnquantizedLinearMethod

logger = logging.getLogger(__name__)


class PackedLinearMethod(UnquantizedLinearMethod):
    """A tied LM head gets a packed copy of its own: the embedding needs plain rows."""

    def process_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(_pack(layer.weight.data), requires_grad=False)

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
