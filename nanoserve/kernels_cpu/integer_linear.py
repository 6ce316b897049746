"""Linears whose weights are integers, and whose inputs are made integers on the way."""

import functools
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanoserve.kernels_cpu.integer_kinds import KINDS, kinds_here
from nanoserve.kernels_cpu.integer_tiles import make_product
from nanoserve.kernels_cpu.panels import PANEL, empty, pack
from nanoserve.kernels_cpu.processor import converts_float16
from nanoserve.kernels_cpu.values import FAST, as_numpy, to_float
from nanoserve.quantization.matrix import QuantizedMatrix

_FEW = 2**15  # values; waking the other threads costs more than so few are worth

product = functools.cache(make_product)


class IntegerPanels:
    """A `QuantizedMatrix` in panels: x [..., inputs] -> [..., outputs] in x's dtype.

    Each row of x becomes integers of -127 to 127 with one scale, its largest absolute value / 127,
    so a row does not depend on its neighbours. A row that holds NaN or infinity becomes NaN.
    """

    def __init__(self, matrix: QuantizedMatrix, kind: str | None = None) -> None:
        self.outputs, self.inputs = matrix.shape
        self.kind = kind or best_kind(matrix.bits, matrix.group_size)
        self.own, self.groups = KINDS[self.kind], matrix.scale.shape[1]
        if matrix.group_of_input is not None:
            raise ValueError("groups that are no runs of inputs have to be sorted before")
        self.codes = _pack_codes(matrix, self.own)
        self.steps = self.codes.shape[1] // self.groups
        self.scale = _pack_scales(matrix.scale)
        self.offset = None if matrix.offset is None else _pack_scales(matrix.offset)

    def __call__(self, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """largest: float32 [rows], the absolute value that 127 stands for, if it is not x's own."""
        rows = x.reshape(-1, self.inputs)
        num_rows = len(rows)
        dtype = x.dtype if x.dtype != torch.float16 or converts_float16() else torch.float32
        out = x.new_empty(num_rows, len(self.codes) * PANEL, dtype=dtype)
        codes, starts, sums, scale = self._quantized(rows, largest)
        # Names, because the memory must stay until the product is there.
        inputs = (
            codes.ctypes.data,
            codes.strides[0],
            starts.ctypes.data,
            sums.ctypes.data,
            starts.strides[0],
            scale.ctypes.data,
        )
        compiled = product(self.kind, str(dtype).removeprefix("torch."), self.offset is not None)
        compiled(
            inputs,
            num_rows,
            self.codes.data_ptr(),
            self.scale.data_ptr(),
            0 if self.offset is None else self.offset.data_ptr(),
            len(self.codes),
            self.groups,
            self.steps,
            out.data_ptr(),
            out.stride(0) * out.itemsize,
        )
        return out[:, : self.outputs].to(x.dtype).contiguous().view(*x.shape[:-1], self.outputs)

    def _quantized(self, rows: Tensor, largest: Tensor | None) -> tuple[np.ndarray, ...]:
        """Codes [num_rows, inputs], starts and sums [num_rows, groups], scale [num_rows]."""
        values = as_numpy((rows.float() if rows.dtype == torch.float16 else rows).contiguous())
        num_rows = len(values)
        codes = np.empty((num_rows, self.inputs), np.int16 if self.own.is_x_wide else np.int8)
        starts = np.empty((num_rows, self.groups), np.int32)
        sums = np.empty((num_rows, self.groups), np.float32)
        scale = np.empty(num_rows, np.float32)
        given = _NONE if largest is None else largest.numpy()
        quantize = _quantize if values.size <= _FEW else _quantize_parallel
        quantize(values, given, self.own.shift, codes, starts, sums, scale)
        return codes, starts, sums, scale


_NONE = np.empty(0, np.float32)


@njit(**FAST)
def _quantize_row(x, given, shift, codes, starts, sums):
    """Returns the scale."""
    largest, zero = np.float32(0), np.float32(0)
    for i in range(len(x)):
        value = to_float(x[i])
        largest = max(largest, abs(value))
        zero += value * np.float32(0)  # NaN, if anything is no number
    if given > 0:
        largest = given
    inverse = np.float32(127) / largest if largest > 0 else np.float32(0)
    size = len(x) // len(starts)
    for group in range(len(starts)):
        total = np.int32(0)
        for i in range(group * size, (group + 1) * size):
            code = np.int32(np.rint(to_float(x[i]) * inverse))
            codes[i] = code
            total += code
        starts[group] = -shift * total
        sums[group] = total
    return largest * np.float32(1 / 127) + zero


@njit(**FAST)
def _quantize(x, given, shift, codes, starts, sums, scale):
    for row in range(len(x)):
        largest = given[row] if len(given) else np.float32(0)
        scale[row] = _quantize_row(x[row], largest, shift, codes[row], starts[row], sums[row])


@njit(parallel=True, **FAST)
def _quantize_parallel(x, given, shift, codes, starts, sums, scale):
    for row in prange(len(x)):
        largest = given[row] if len(given) else np.float32(0)
        scale[row] = _quantize_row(x[row], largest, shift, codes[row], starts[row], sums[row])


def best_kind(bits: int, group_size: int) -> str:
    """Of this processor's, for codes of so many bits: of more, if only those take such groups."""
    return next(
        name
        for own_bits in (bits, 8)
        for name in kinds_here()
        if KINDS[name].bits == own_bits and KINDS[name].takes(group_size)
    )


def _pack_codes(matrix: QuantizedMatrix, own: Any) -> Tensor:
    """uint8 [panels, steps, ...]: `depth` inputs of an output side by side."""
    outputs, _ = matrix.shape
    codes = matrix.codes
    if own.bits == 8:
        return pack((codes.view(torch.uint8) ^ own.shift) if own.shift else codes, own.depth)
    # Two to a byte: the first half of a step's inputs low, the second high.
    codes = (codes + own.shift).view(torch.uint8).view(outputs, -1, 2, own.depth // 2)
    return pack((codes[:, :, 0] | codes[:, :, 1] << 4).view(outputs, -1), own.depth // 2)


def _pack_scales(scale: Tensor) -> Tensor:
    """float32 [outputs, groups] -> [panels, groups, PANEL]."""
    outputs, groups = scale.shape
    packed = empty((-(-outputs // PANEL), groups, PANEL), torch.float32)
    for panel, rows in enumerate(scale.split(PANEL)):
        packed[panel, :, : len(rows)] = rows.t()
    return packed
