"""Linears whose weights are integers, and whose inputs are made integers on the way."""

import functools
from typing import Any

import torch
from torch import Tensor

from nanoserve.kernels_cpu import checks
from nanoserve.kernels_cpu.integer_kinds import KINDS, kinds_here
from nanoserve.kernels_cpu.integer_tiles import make_product
from nanoserve.kernels_cpu.panels import PANEL, empty, pack, unpadded
from nanoserve.kernels_cpu.processor import converts_float16
from nanoserve.kernels_cpu.values import ELEMENTS, address
from nanoserve.quantization.matrix import QuantizedMatrix

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_product = functools.cache(make_product)


class IntegerPanels:
    """A `QuantizedMatrix` in panels: x [..., inputs] -> [..., outputs] in x's dtype.

    Each row of x becomes integers of -127 to 127 with one scale, its largest absolute value / 127,
    so a row does not depend on its neighbours. A row that holds NaN or infinity becomes NaN.
    """

    takes_largest = True

    def __init__(self, matrix: QuantizedMatrix, kind: str | None = None) -> None:
        checks.check_weight(matrix.codes, (torch.int8,))
        for values in (matrix.scale, matrix.offset):
            if values is not None:
                checks.check_weight(values, (torch.float32,))
        self.outputs, self.inputs = matrix.shape
        self.kind = kind or best_kind(matrix.bits, matrix.group_size)
        self.own, self.groups = KINDS[self.kind], matrix.scale.shape[1]
        if self.own.bits < matrix.bits or not self.own.takes(matrix.group_size):
            raise ValueError(
                f"{self.kind!r} has no codes of {matrix.bits} bits in groups of {matrix.group_size}"
            )
        if matrix.group_of_input is not None:
            raise ValueError("groups that are no runs of inputs have to be sorted before")
        self.codes = pack_codes(matrix, self.own)
        self.scale = pack_scales(matrix.scale, scale_dtype(matrix))
        self.offset = None if matrix.offset is None else pack_scales(matrix.offset, torch.float32)
        self._stored = (
            self.codes.data_ptr(),
            self.scale.data_ptr(),
            0 if self.offset is None else self.offset.data_ptr(),
            self.codes.shape[0],
            self.groups,
            self.codes.shape[1] // self.groups,
        )

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """largest: float32 [rows], the absolute value that 127 stands for, if it is not x's own."""
        checks.check_linear(x, self.inputs, tuple(_NAMES))
        rows = (x if x.dtype != torch.float16 else x.float()).contiguous()
        dtype = x.dtype if x.dtype != torch.float16 or converts_float16() else torch.float32
        num_rows = x.numel() // self.inputs
        if largest is not None:
            is_one = largest.dtype == torch.float32 and largest.numel() == num_rows
            if not (is_one and largest.is_contiguous()):
                checks.refuse(f"must be contiguous float32 [{num_rows}]", largest=largest)
        out = x.new_empty(num_rows, self.codes.shape[0] * PANEL, dtype=dtype)
        _product(self.kind, _NAMES[dtype], _NAMES[self.scale.dtype], self.offset is not None)(
            rows.data_ptr(),
            num_rows,
            ELEMENTS[rows.dtype],
            0 if largest is None else address(largest),
            *self._stored,
            out.data_ptr(),
            out.stride(0) * out.itemsize,
        )
        return unpadded(out, self.outputs, x)


def best_kind(bits: int, group_size: int) -> str:
    """Of this processor's, for codes of so many bits: of more, if only those take such groups."""
    return next(
        name
        for own_bits in (bits, 8)
        for name in kinds_here()
        if KINDS[name].bits == own_bits and KINDS[name].takes(group_size)
    )


def pack_codes(matrix: QuantizedMatrix, own: Any) -> Tensor:
    """uint8 [panels, steps, ...]: `depth` inputs of an output side by side."""
    outputs, _ = matrix.shape
    codes = matrix.codes
    if own.bits == 8:
        return pack((codes.view(torch.uint8) ^ own.shift) if own.shift else codes, own.depth)
    # Two to a byte: the first half of a step's inputs low, the second high.
    codes = (codes + own.shift).view(torch.uint8).view(outputs, -1, 2, own.depth // 2)
    return pack((codes[:, :, 0] | codes[:, :, 1] << 4).view(outputs, -1), own.depth // 2)


def scale_dtype(matrix: QuantizedMatrix) -> torch.dtype:
    """float16, if a row has many scales and all of them are: then they are a tenth fewer bytes."""
    groups, scale = matrix.scale.shape[1], matrix.scale
    is_half = groups > 1 and converts_float16() and torch.equal(scale.half().float(), scale)
    return torch.float16 if is_half else torch.float32


def pack_scales(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [outputs, groups] -> [panels, groups, PANEL]."""
    outputs, groups = scale.shape
    packed = empty((-(-outputs // PANEL), groups, PANEL), dtype)
    for panel, rows in enumerate(scale.split(PANEL)):
        packed[panel, :, : len(rows)] = rows.t()
    return packed
