"""Online quantization of float weights during loading: `quantization="int8"`, "int4" or "fp8"."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix

GROUP_SIZES = (128, 64, 32)
# Shares of a group's largest magnitude that the largest 4-bit code represents. Clipping a few
# values makes the steps finer for all others; the share with the smallest error is used.
_SHARES = (1.0, 0.92, 0.84)
_PIECE = 2**20  # values that are quantized at a time


def quantize_int8(weight: Tensor, group_size: int | None = None) -> QuantizedMatrix:
    """Quantize to int8 with one scale per row or group: absmax / 127.

    The rounding error is at most scale / 2. A group containing NaN or inf gets a NaN scale.
    """
    num_inputs = weight.shape[1]
    size = num_inputs if group_size is None else group_size_for(num_inputs, group_size)
    return _in_pieces(weight, size, 8, _int8_of)


def quantize_fp8(weight: Tensor) -> QuantizedMatrix:
    """Quantize to e4m3 (Micikevicius et al. 2022) with one scale per row: absmax / 448.

    The rounding error is at most 1/16 of the value, or scale x 2^-10 if this is larger.
    """
    scale = _magnitude(weight.float().abs().amax(dim=1, keepdim=True)) / 448
    quotients = (weight.float() / _divisor(scale)).nan_to_num_(0.0)
    codes = quotients.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)
    return QuantizedMatrix(codes, scale, is_e4m3=True)


def quantize_int4(weight: Tensor, group_size: int) -> QuantizedMatrix:
    """Quantize to 4 bits in groups of at most `group_size` inputs: see `group_size_for`.

    The value of largest magnitude gets the code -8, whatever its sign: a scale may be negative. Of
    a few candidates, a group gets the scale with the smallest sum of squared errors. Scales are
    rounded to float16, except those outside its range.

    Raises `ValueError` if no group size divides the inputs.
    """
    return _in_pieces(weight, group_size_for(weight.shape[1], group_size), 4, _int4_of)


def _in_pieces(
    weight: Tensor, size: int, bits: int, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> QuantizedMatrix:
    """Quantize some rows at a time: the temporary tensors stay in the processor's cache."""
    outputs, inputs = weight.shape
    codes = torch.empty(outputs, inputs, dtype=torch.int8, device=weight.device)
    scale = torch.empty(outputs, inputs // size, device=weight.device)
    step = max(1, _PIECE // inputs)
    for row in range(0, outputs, step):
        groups = weight[row : row + step].float().unflatten(1, (-1, size))
        piece_codes, piece_scale = quantize(groups)
        codes[row : row + step] = piece_codes.flatten(1)
        scale[row : row + step] = piece_scale.squeeze(2)
    return QuantizedMatrix(codes, scale, bits=bits)


def _int8_of(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, as floats, and the scale [rows, groups, 1] of [rows, groups, size]."""
    scale = _magnitude(groups.abs().amax(dim=2, keepdim=True)) / 127
    return (groups / _divisor(scale)).round_().nan_to_num_(0.0), scale


def _int4_of(groups: Tensor) -> tuple[Tensor, Tensor]:
    low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)
    largest = _magnitude(torch.where(-low > high, low, high))
    scale, error = _as_half(largest / -8), torch.full_like(largest, torch.inf)
    for share in _SHARES:
        tried = _as_half(largest * (share / -8))
        codes = (groups / _divisor(tried)).round_().clamp_(-8, 7)
        difference = codes.mul_(tried).sub_(groups).square_().sum(dim=2, keepdim=True)
        is_better = difference < error
        scale, error = torch.where(is_better, tried, scale), difference.minimum(error)
    return (groups / _divisor(scale)).round_().clamp_(-8, 7).nan_to_num_(0.0), scale


def group_size_for(num_inputs: int, requested: int) -> int:
    """Return the largest of `GROUP_SIZES`, at most `requested`, that divides the inputs."""
    for size in GROUP_SIZES:
        if size <= requested and num_inputs % size == 0:
            return size
    raise ValueError(
        f"the {num_inputs} inputs of a linear cannot be divided into groups of {GROUP_SIZES[-1]} "
        f"to {requested}: use quantization='int8', which has per-channel scales"
    )


def _magnitude(values: Tensor) -> Tensor:
    """Replace infinity by NaN: neither has a code."""
    return values.masked_fill(~values.isfinite(), torch.nan)


def _as_half(scale: Tensor) -> Tensor:
    """Round to float16, except values outside the range of its normal numbers."""
    half = scale.half().float()
    is_near = (half.abs() >= torch.finfo(torch.float16).tiny) & half.isfinite() | (scale == 0)
    return torch.where(is_near, half, scale)


def _divisor(scale: Tensor) -> Tensor:
    """Return the scale with 1 in place of 0, so that a group of zeros gets codes of 0."""
    return scale.masked_fill(scale == 0, 1.0)
