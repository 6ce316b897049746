"""Weight forms for matrix products in torch.

A form is created from a weight [outputs, inputs]. Calling it multiplies: x [..., inputs] ->
[..., outputs].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels.cpu import checks, packed_linear

Form = Callable[[Tensor], Tensor]

_TILE = 512  # outputs that are widened at a time: they stay in the processor's cache
_TILE_VALUES = 2**19  # weights that are dequantized at a time: 2 MiB


class Plain:
    """A weight as in the checkpoint, multiplied by `F.linear`."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Packed:
    """A bfloat16 weight packed for oneDNN: see `nanoserve.kernels.cpu.packed_linear`."""

    def __init__(self, weight: Tensor) -> None:
        checks.check_weight(weight, (torch.bfloat16,))
        self.weight, self._inputs = packed_linear.pack(weight), weight.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        checks.check_linear(x, self._inputs, (torch.bfloat16,))
        return packed_linear.linear(x, self.weight)


class WidenedTiles:
    """A 16-bit weight, widened tile by tile for a float32 product.

    Where torch has no native 16-bit product, its fallback is ten times slower than this.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        wide, tiles = x.float(), self.weight.split(_TILE)
        return torch.cat([F.linear(wide, tile.float()).to(x.dtype) for tile in tiles], dim=-1)


class DequantizedTiles:
    """A weight of 4-bit or 8-bit integers, dequantized tile by tile for a float32 product.

    A weight is code x scale + offset. codes: int8 [outputs, inputs]; scale and offset: float32
    [outputs, groups]; a group is a run of inputs.

    x and sums are float32, and only the result is rounded, to x's dtype. A row does not depend on
    the values of other rows; but torch chooses the order of additions by the number of rows, so the
    last bits may depend on it.
    """

    def __init__(
        self, codes: Tensor, scale: Tensor, offset: Tensor | None = None, bits: int = 8
    ) -> None:
        checks.check_codes(codes, scale, offset, bits)
        self.outputs, self.inputs = codes.shape
        self._is_packed = bits == 4 and self.inputs % 2 == 0
        num_rows = max(1, _TILE_VALUES // self.inputs)
        tiles = [self._pack(tile) for tile in codes.split(num_rows)]
        # Copies, so that the whole matrix can be freed.
        scales = [tile.clone() for tile in scale.split(num_rows)]
        offsets: list[Tensor | None] = [None] * len(tiles)
        if offset is not None:
            offsets = [tile.clone() for tile in offset.split(num_rows)]
        self._tiles = list(zip(tiles, scales, offsets, strict=True))

    def __call__(self, x: Tensor) -> Tensor:
        checks.check_linear(x, self.inputs, (torch.float32, torch.bfloat16, torch.float16))
        wide = x.float()
        return torch.cat([F.linear(wide, self._weight(*t)).to(x.dtype) for t in self._tiles], -1)

    def _pack(self, codes: Tensor) -> Tensor:
        """Pack two codes per byte: a row's first half in the low halves, the second in the high."""
        if not self._is_packed:
            return codes.clone()
        first, second = (codes + 8).view(torch.uint8).chunk(2, dim=1)
        return first | second << 4

    def _weight(self, codes: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        """Return the weights of a tile: float32 [outputs, inputs]."""
        if self._is_packed:
            codes = torch.cat([codes & 15, codes >> 4], dim=1)
        weight = codes.float()
        if self._is_packed:
            weight -= 8
        groups = weight.view(*scale.shape, -1)
        groups *= scale[..., None]
        if offset is not None:
            groups += offset[..., None]
        return weight
