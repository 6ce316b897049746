"""Integers made of float weights: how far from them they are at most, and what cannot be made."""

import pytest
import torch
from torch import Tensor

from nanoserve.models.quantization.online import group_size_for, quantize_int4, quantize_int8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weights(dtype: torch.dtype, num_inputs: int = 192) -> Tensor:
    """Rows of sizes from 1e-4 to 1e3, one with an outlier, one of a single sign."""
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn(40, num_inputs, generator=generator)
    weight *= 10.0 ** torch.linspace(-4, 3, 40)[:, None]
    weight[7, 5] *= 100
    weight[9].abs_()
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [None, 64])
def test_int8_is_half_a_scale_from_the_weight_at_most(
    dtype: torch.dtype, group_size: int | None
) -> None:
    weight = weights(dtype)
    matrix = quantize_int8(weight, group_size)
    scale = matrix.scale.double().repeat_interleave(group_size or 192, dim=1)
    error = (matrix.codes.double() * scale - weight.double()).abs()
    assert matrix.bits == 8 and matrix.offset is None and matrix.group_size == (group_size or 192)
    assert (error <= scale * (0.5 + 1e-5)).all() and error.max() > 0.4 * scale.min()
    # The largest magnitude of each is +-127, and none is -128.
    largest = matrix.codes.unflatten(1, (-1, group_size or 192)).abs().amax(dim=2)
    assert (largest == 127).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_is_near_the_weight(dtype: torch.dtype, group_size: int) -> None:
    """Half a scale from it, but where a few values have been cut off, and for the far end.

    A code is 8 sixteenths of the range on one side and 7 on the other, and up to 16 % are cut off
    (the share 0.84): (8 / 0.84) - 7 = 2.53 scales.
    """
    weight = weights(dtype, 256)
    matrix = quantize_int4(weight, group_size)
    scale = matrix.scale.double().abs().repeat_interleave(group_size, dim=1)
    error = (matrix.dequantize().double() - weight.double()).abs()
    assert matrix.bits == 4 and matrix.offset is None and matrix.group_size == group_size
    assert matrix.codes.min() == -8 and matrix.codes.max() == 7
    is_inside = (matrix.codes > -8) & (matrix.codes < 7)
    assert (error <= scale * (0.5 + 1e-5))[is_inside].all()
    assert (error <= 2.53 * scale).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_is_no_worse_than_the_nearest_codes_of_the_usual_scale(group_size: int) -> None:
    """By the sum of squares: w / s rounded, with s = the largest magnitude / 7 or / 8.

    In each group, if the largest is the code -8, of whichever sign; else on average.
    """
    weight = weights(torch.float32, 256)
    groups = weight.double().unflatten(1, (-1, group_size))
    largest = groups.abs().amax(dim=2, keepdim=True)
    is_negative = groups.amin(dim=2, keepdim=True) == -largest

    def squares(dequantized: Tensor) -> Tensor:
        return (dequantized.double().unflatten(1, (-1, group_size)) - groups).square().sum(dim=2)

    def nearest(scale: Tensor) -> Tensor:
        return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)

    found = squares(quantize_int4(weight, group_size).dequantize())
    for most in (7, 8):
        assert (found / squares(nearest(largest / most))).mean() < 0.97
    signed = torch.where(is_negative, largest, -largest) / 8
    better = found / squares(nearest(signed))
    # Cutting off gains as much; that scales are numbers of 11 bits may lose a hundredth.
    assert (better < 1.01).all() and better.mean() < 0.97


@pytest.mark.parametrize("quantize", [quantize_int8, lambda w: quantize_int4(w, 32)])
def test_zeros_and_what_is_no_number(quantize) -> None:
    weight = weights(torch.float32, 64)
    clean = quantize(weight).dequantize()
    weight[2], weight[3, 1], weight[4, 63], weight[5, 0] = 0, torch.nan, torch.inf, -torch.inf
    found = quantize(weight).dequantize()
    assert torch.equal(found[2].abs(), torch.zeros(64))
    size = quantize(weight).group_size
    for row, column in ((3, 1), (4, 63), (5, 0)):
        group = slice(column // size * size, column // size * size + size)
        assert found[row, group].isnan().all()  # all that has its scale, and nothing else
        found[row, group] = clean[row, group]
    kept = [row for row in range(40) if row != 2]
    assert torch.equal(found[kept], clean[kept])


def test_groups_divide_the_inputs() -> None:
    asked = {(256, 128): 128, (192, 128): 64, (96, 128): 32, (256, 64): 64, (256, 32): 32}
    assert {pair: group_size_for(*pair) for pair in asked} == asked
    for num_inputs in (48, 16, 100):
        with pytest.raises(ValueError, match=rf"{num_inputs} inputs .* groups of 32 to 64.*int8"):
            group_size_for(num_inputs, 64)
    assert quantize_int4(torch.ones(2, 192), 128).group_size == 64
    assert quantize_int8(torch.ones(2, 48)).group_size == 48


def test_scales_of_int4_are_numbers_of_float16_where_it_has_them() -> None:
    weight = torch.randn(16, 64, generator=torch.manual_seed(0))
    scale = quantize_int4(weight, 32).scale
    assert torch.equal(scale.half().float(), scale)
    codes = quantize_int4(weight, 32).codes
    for size in (2.0**-30, 2.0**30):  # beyond float16
        matrix = quantize_int4(weight * size, 32)
        error = (matrix.dequantize() / size - weight).square().mean()
        assert error < 0.01 and (matrix.codes == codes).float().mean() > 0.99
