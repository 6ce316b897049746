"""Linear layers with 16-bit or 32-bit float weights in panels, multiplied by our own tiles."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels.cpu import checks, packed_linear
from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.float_tiles import KINDS, make_product
from nanoserve.kernels.cpu.packing import PANEL, pack, rows_of, unpadded
from nanoserve.kernels.cpu.torch_linear import Packed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_product = functools.cache(make_product)


class FloatPanels:
    """Float weights in panels: x [..., inputs] -> [..., outputs].

    kind: one of `nanoserve.kernels.cpu.float_tiles.KINDS`; None is the best for this processor.
    """

    keeps_rows = True  # `rows` returns the original weights

    def __init__(self, weight: Tensor, kind: str | None = None) -> None:
        checks.check_weight(weight, _DTYPES)
        self.outputs, self.inputs = weight.shape
        self.kind, self.dtype = kind or best_kind(weight.dtype), weight.dtype
        self.own = _own(self.kind, weight)
        self.weight = pack(weight, self.own.depth)
        self._use(self.weight.data_ptr())

    def rows(self, indices: Tensor) -> Tensor:
        """Return the weights [n, inputs] of the outputs `indices`, int [n], as before packing."""
        return rows_of(self.weight, indices, self.inputs)

    def _use(self, address: int) -> None:
        steps = -(-self.inputs // self.own.depth)
        self._padding = steps * self.own.depth - self.inputs
        self._stored = (address, -(-self.outputs // PANEL), steps)

    def __call__(self, x: Tensor) -> Tensor:
        checks.check_linear(x, self.inputs, (self.dtype,))
        rows = F.pad(x, (0, self._padding)) if self._padding else x
        rows = (rows.float() if self.own.widens else rows).contiguous()
        num_rows = x.numel() // self.inputs
        out = x.new_empty(num_rows, self._stored[1] * PANEL)
        _product(self.kind)(
            rows.data_ptr(),
            rows.shape[-1] * rows.itemsize,
            num_rows,
            *self._stored,
            out.data_ptr(),
            out.stride(0) * out.itemsize,
        )
        return unpadded(out, self.outputs, x)


class SharedPanels(FloatPanels):
    """Weights packed by oneDNN, which our tiles can also read if the layout is the same.

    num_rows: oneDNN multiplies inputs of at least so many rows, and our tiles inputs of fewer.
    """

    keeps_rows = False  # the memory belongs to oneDNN

    def __init__(self, weight: Tensor, num_rows: int, kind: str | None = None) -> None:
        checks.check_weight(weight, (torch.bfloat16,))
        self.outputs, self.inputs = weight.shape
        self.kind, self.dtype = kind or best_kind(weight.dtype), weight.dtype
        self.own, self._num_rows = _own(self.kind, weight), num_rows
        self._packed = Packed(weight)
        address, num_bytes = packed_linear.memory(self._packed.weight)
        self._use(address)
        _, panels, steps = self._stored
        if num_bytes != panels * steps * PANEL * self.own.depth * weight.itemsize:
            self._num_rows = 0  # oneDNN's padding differs: use oneDNN for all inputs

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() // self.inputs < self._num_rows:
            return super().__call__(x)
        checks.check_linear(x, self.inputs, (self.dtype,))
        return self._packed(x)


def _own(kind: str, weight: Tensor) -> Any:
    """Return the tiles of one kind. Raises `ValueError` if the weight has another dtype."""
    own = KINDS[kind]
    if str(weight.dtype) != f"torch.{own.dtype}":
        checks.refuse(f"kind={kind!r} needs a weight of {own.dtype}", weight=weight)
    return own


def best_kind(dtype: torch.dtype) -> str:
    """Return the best of `KINDS` for this processor."""
    if dtype == torch.bfloat16 and has("avx512bf16"):
        return "pairs of bfloat16"
    return f"widened {str(dtype).removeprefix('torch.')}"


@functools.cache
def shares_memory() -> bool:
    """Return True if oneDNN packs weights in the layout of our panels, which is not documented."""
    weight = torch.arange(128 * 64).to(torch.int16).view(torch.bfloat16).view(128, 64)
    packed = packed_linear.pack(weight)
    address, num_bytes = packed_linear.memory(packed)
    ours = pack(weight, 2)
    theirs = packed_linear.bytes_at(address, num_bytes)
    return torch.equal(ours.view(torch.uint8).flatten(), theirs)
