"""The forms of a weight that torch multiplies.

A form is made from a plain weight [outputs, inputs]. To call it is to multiply: x [..., inputs] ->
[..., outputs].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels_cpu import checks, packed_linear

_TILE = 512  # outputs that are widened at a time: they stay in the cache until they are used


class Plain:
    """As the checkpoint has it."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Packed:
    """oneDNN's product of bfloat16: see `nanoserve.kernels_cpu.packed_linear`."""

    def __init__(self, weight: Tensor) -> None:
        checks.check_weight(weight, (torch.bfloat16,))
        self.weight, self._inputs = packed_linear.pack(weight), weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        checks.check_linear(x, self._inputs, (torch.bfloat16,))
        return packed_linear.linear(x, self.weight)


class WidenedTiles:
    """16 bits in memory, widened tile by tile for the product of float32.

    Where torch has no product of 16 bits, its fallback is ten times slower than this.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        wide, tiles = x.float(), self.weight.split(_TILE)
        return torch.cat([F.linear(wide, tile.float()).to(x.dtype) for tile in tiles], dim=-1)
