"""Integer weights at the ends of their range, and what a product with them is, exactly."""

import math

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix


def random_matrix(
    bits: int, outputs: int, inputs: int, group_size: int, *, has_offset: bool, seed: int = 0
) -> QuantizedMatrix:
    """The first outputs are nothing but the least and the greatest codes."""
    generator = torch.Generator().manual_seed(seed)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    codes = torch.randint(low, high + 1, (outputs, inputs), generator=generator)
    for row, ends in enumerate(((low, low), (high, high), (low, high), (high, low))[:outputs]):
        codes[row, ::2], codes[row, 1::2] = ends
    shape = outputs, inputs // group_size
    scale = torch.randn(shape, generator=generator) / 100
    offset = torch.randn(shape, generator=generator) / 10 if has_offset else None
    return QuantizedMatrix(codes.to(torch.int8), scale, offset, bits)


def random_codes(num_rows: int, inputs: int, seed: int = 1) -> Tensor:
    """Inputs that are their own codes: integers, with a 127 in each group that has a scale.

    Which are 16, or as many as divide all inputs; some rows are nothing but 127 and -127.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (num_rows, inputs), generator=generator).float()
    size = math.gcd(inputs, 16)
    places = torch.randint(size, (num_rows, inputs // size, 1), generator=generator)
    x = x.unflatten(1, (-1, size)).scatter(2, places, 127).flatten(1)
    for row, ends in enumerate(((127, 127), (-127, -127), (127, -127), (-127, 127))[:num_rows]):
        x[row, ::2], x[row, 1::2] = ends
    return x


def exact_product(matrix: QuantizedMatrix, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of such inputs, in float64, and the sum of the magnitudes of its terms.

    `x` is of integers, whose sums are far below 2^53: float64 has them all, and multiplies
    matrices much sooner than int64 does.
    """
    groups = matrix.scale.shape[1]
    codes = matrix.codes.double().unflatten(1, (groups, -1))
    inputs = x.double().unflatten(1, (groups, -1))
    sums = torch.einsum("ngk,mgk->mng", codes, inputs)
    terms = sums * matrix.scale.double()
    magnitudes = terms.abs()
    if matrix.offset is not None:
        shifts = inputs.sum(dim=2)[:, None] * matrix.offset.double()
        terms, magnitudes = terms + shifts, magnitudes + shifts.abs()
    return terms.sum(dim=2), magnitudes.sum(dim=2)


def assert_product(y: Tensor, matrix: QuantizedMatrix, x: Tensor) -> None:
    """`y` is as near to the exact product as sums of float32 over the groups allow."""
    exact, magnitudes = exact_product(matrix, x)
    rounding = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[y.dtype]
    bound = (2 * matrix.scale.shape[1] + 4) * 2**-24 * magnitudes + rounding * exact.abs() + 1e-7
    wrong = (y.double() - exact).abs() / bound
    assert y.shape == exact.shape and wrong.max() <= 1.01, wrong.max()
