"""Linear layers with integer weights, whose inputs are quantized to integers on the fly."""

import functools
from typing import Any

import torch
from torch import Tensor

from nanoserve.kernels.cpu import checks
from nanoserve.kernels.cpu.cpu_features import converts_float16
from nanoserve.kernels.cpu.elements import ELEMENTS
from nanoserve.kernels.cpu.integer_inputs import GROUP
from nanoserve.kernels.cpu.integer_tiles import make_product
from nanoserve.kernels.cpu.isa import KINDS, kinds_here
from nanoserve.kernels.cpu.memory import map_zeros
from nanoserve.kernels.cpu.packing import PANEL, empty_panels, pack_into, unpadded

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_PIECE = 2**22  # codes that are packed at a time
_product = functools.cache(make_product)


class IntegerPanels:
    """Integer weights in panels: x [..., inputs] -> [..., outputs] in x's dtype.

    A weight is code x scale + offset. codes: int8 [outputs, inputs], of 4 or 8 `bits`; scale and
    offset (None is all zeros): float32 [outputs, groups]; a group is a run of inputs. kind: one of
    `nanoserve.kernels.cpu.isa.KINDS`; None is the best for this processor.

    Each group of inputs in a row of x (see `x_group_size`) is quantized to integers from -127 to
    127 with one scale, the largest magnitude / 127: a row does not depend on other rows. The result
    of a row with NaN or infinity is NaN.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        offset: Tensor | None = None,
        bits: int = 8,
        *,
        kind: str | None = None,
    ) -> None:
        checks.check_codes(codes, scale, offset, bits)
        (self.outputs, self.inputs), groups = codes.shape, scale.shape[1]
        group_size = self.inputs // groups
        self.size = x_group_size(group_size)
        self.kind = kind or best_kind(bits, self.size)
        self.own = KINDS[self.kind]
        if self.own.bits < bits or not self.own.takes(self.size):
            raise ValueError(
                f"kind={self.kind!r} does not support {bits}-bit codes in groups of {self.size}"
            )
        self.codes = pack_codes(codes, self.own)
        self.scale = pack_scales(scale, scale_dtype(scale))
        self.offset = None if offset is None else pack_scales(offset, torch.float32)
        self._stored = (
            self.codes.data_ptr(),
            self.scale.data_ptr(),
            0 if self.offset is None else self.offset.data_ptr(),
            self.codes.shape[0],
            groups,
            group_size // self.size,
            self.size // self.own.depth,
        )
        self._form = (
            self.kind,
            self.size,
            self.size == group_size,
            _NAMES[self.scale.dtype],
            self.offset is not None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        checks.check_linear(x, self.inputs, tuple(_NAMES))
        rows = (x if x.dtype != torch.float16 else x.float()).contiguous()
        dtype = x.dtype if x.dtype != torch.float16 or converts_float16() else torch.float32
        num_rows = x.numel() // self.inputs
        out = x.new_empty(num_rows, self.codes.shape[0] * PANEL, dtype=dtype)
        _product(_NAMES[dtype], *self._form)(
            rows.data_ptr(),
            num_rows,
            ELEMENTS[rows.dtype],
            *self._stored,
            out.data_ptr(),
            out.stride(0) * out.itemsize,
        )
        return unpadded(out, self.outputs, x)


def x_group_size(group_size: int) -> int:
    """Return the inputs of x per scale: the largest divisor of a weight's group, up to 32."""
    return next(size for size in range(GROUP, 0, -1) if group_size % size == 0)


def best_kind(bits: int, group_size: int) -> str:
    """Return the best kind here for codes of `bits`; of 8 bits if no other supports the groups."""
    return next(
        name
        for own_bits in (bits, 8)
        for name in kinds_here()
        if KINDS[name].bits == own_bits and KINDS[name].takes(group_size)
    )


def pack_codes(codes: Tensor, own: Any) -> Tensor:
    """Pack int8 [outputs, inputs] into uint8 [panels, steps, ...]: see `own.depth`.

    Packs some panels at a time: the shifted codes of a whole LM head would be as large as the
    result.
    """
    outputs, inputs = codes.shape
    depth = own.depth if own.bits == 8 else own.depth // 2
    packed = empty_panels(outputs, inputs * own.bits // 8, depth, torch.uint8)
    num_rows = PANEL * max(1, _PIECE // (PANEL * inputs))
    for row in range(0, outputs, num_rows):
        piece = _codes_in_bytes(codes[row : row + num_rows], own)
        first = row // PANEL
        pack_into(packed[first : first - (-len(piece) // PANEL)], piece)
    return packed


def _codes_in_bytes(codes: Tensor, own: Any) -> Tensor:
    """Convert int8 [outputs, inputs] to uint8 [outputs, bytes of a row]."""
    if own.bits == 8:
        codes = codes.view(torch.uint8)
        return codes ^ own.shift if own.shift else codes
    # Two codes per byte: the first half of a step's inputs in the low half, the second in the high.
    codes = (codes + own.shift).view(torch.uint8).view(len(codes), -1, 2, own.depth // 2)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).view(len(codes), -1)


def scale_dtype(scale: Tensor) -> torch.dtype:
    """Return float16 if a row has several scales and float16 holds all exactly, else float32.

    With groups of 32, this saves a tenth of the bytes of 4-bit weights.
    """
    is_many = scale.shape[1] > 1
    is_half = is_many and converts_float16() and torch.equal(scale.half().float(), scale)
    return torch.float16 if is_half else torch.float32


def pack_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack float32 [outputs, groups] into [panels, groups, PANEL] of `dtype`."""
    outputs, groups = scale.shape
    packed = map_zeros((-(-outputs // PANEL), groups, PANEL), dtype)
    for panel, rows in enumerate(scale.split(PANEL)):
        packed[panel, :, : len(rows)] = rows.t()
    return packed
