"""Codes out of float weights, when a model is loaded: `quantization="int8"`, "int4" and "fp8"."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix

GROUP_SIZES = (128, 64, 32)
# Of a group's largest magnitude, what the largest code of 4 bits stands for. To cut a few values
# off makes the steps finer for all the others; which of these does the least damage is tried.
_SHARES = (1.0, 0.92, 0.84)
_PIECE = 2**20  # values that become integers at a time


def quantize_int8(weight: Tensor, group_size: int | None = None) -> QuantizedMatrix:
    """A scale for each row, or each group of a row: its largest magnitude / 127.

    An element's error is at most half a scale. What holds NaN or infinity gets a scale of NaN.
    """
    num_inputs = weight.shape[1]
    size = num_inputs if group_size is None else group_size_for(num_inputs, group_size)
    return _in_pieces(weight, size, 8, _int8_of)


def quantize_fp8(weight: Tensor) -> QuantizedMatrix:
    """e4m3 with a scale for each row: its largest magnitude / 448 (Micikevicius et al. 2022).

    An element's error is at most a sixteenth of it, or half of 2^-9 scales where that is more.
    """
    scale = _magnitude(weight.float().abs().amax(dim=1, keepdim=True)) / 448
    quotients = (weight.float() / _divisor(scale)).nan_to_num_(0.0)
    codes = quotients.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.int8)
    return QuantizedMatrix(codes, scale, is_e4m3=True)


def quantize_int4(weight: Tensor, group_size: int) -> QuantizedMatrix:
    """Groups of `group_size` inputs; of smaller ones, if these do not divide the inputs.

    The value of largest magnitude gets the code -8, of either sign: a scale may be negative. Of a
    few such scales a group has the one with the least sum of squared errors. Scales are numbers of
    float16, but for those that are too small or too large for it.

    Raises `ValueError` if there is no group for so many inputs.
    """
    return _in_pieces(weight, group_size_for(weight.shape[1], group_size), 4, _int4_of)


def _in_pieces(
    weight: Tensor, size: int, bits: int, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> QuantizedMatrix:
    """Some rows at a time: what is computed on the way stays in the processor's cache."""
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
    """float32 [rows, groups, size] -> codes, as floats, and scale [rows, groups, 1]."""
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


def group_size_for(num_inputs: int, asked: int) -> int:
    """The largest group of at most `asked` inputs that divides them."""
    for size in GROUP_SIZES:
        if size <= asked and num_inputs % size == 0:
            return size
    raise ValueError(
        f"{num_inputs} inputs of a linear do not divide into groups of {GROUP_SIZES[-1]} to "
        f"{asked}: quantization='int8' has one scale for all of them"
    )


def _magnitude(values: Tensor) -> Tensor:
    """Infinity is as bad as NaN: neither has codes."""
    return values.masked_fill(~values.isfinite(), torch.nan)


def _as_half(scale: Tensor) -> Tensor:
    """The nearest of float16, where one is as near as a number of 11 bits can be."""
    half = scale.half().float()
    is_near = (half.abs() >= torch.finfo(torch.float16).tiny) & half.isfinite() | (scale == 0)
    return torch.where(is_near, half, scale)


def _divisor(scale: Tensor) -> Tensor:
    """A group of zeros has a scale of zero, and codes of zero."""
    return scale.masked_fill(scale == 0, 1.0)
