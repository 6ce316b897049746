"""Products of integer weights with inputs that stay floats, against float64 of the same numbers."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from integer_weights import random_matrix
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.kernels.cpu.torch_linear import DequantizedTiles
from nanoserve.worker.threads import threads

ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
ROWS = (1, 2, 3, 5, 7, 70)
GROUP_SIZES = (128, 64, 32, 16)
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")
Make = Callable[[QuantizedMatrix], Any]


def panels(matrix: QuantizedMatrix) -> Any:
    from nanoserve.kernels.cpu.dequantized_linear import DequantizedPanels

    return DequantizedPanels(*matrix.operands())


def tiles(matrix: QuantizedMatrix) -> DequantizedTiles:
    return DequantizedTiles(*matrix.operands())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two of them in each of several test processes would wait for each other."""
    with threads(1):
        yield


@pytest.fixture(params=[tiles, pytest.param(panels, marks=needs_numba)])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def inputs(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of a real model's kind: a few are thousands of times as large as the others."""
    x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows))
    x[:, ::37] *= 5000
    return x.to(dtype)


def assert_right(y: Tensor, x: Tensor, matrix: QuantizedMatrix) -> None:
    """As near as sums of float32 and the rounding of the result allow (Higham 2002, eq. 3.5)."""
    wide, weight = x.double(), matrix.dequantize().double()
    exact, magnitudes = wide @ weight.T, wide.abs() @ weight.abs().T
    bound = (x.shape[-1] + 2) * 2**-24 * magnitudes
    bound = bound + ROUNDING[x.dtype] * (exact.abs() + bound) + 2**-25
    assert y.dtype == x.dtype and y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.small(has_offset=[True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_offset", [False, True])
def test_products_are_those_of_the_dequantized_weight(
    make: Make, bits: int, has_offset: bool, full_size: bool
) -> None:
    for group_size in (256, *GROUP_SIZES):
        for outputs in (1, 63, 64, 65, 200) if full_size else (65, 200):
            matrix = random_matrix(bits, outputs, 256, group_size, has_offset=has_offset)
            form = make(matrix)
            is_each = full_size and outputs == 65
            for num_rows in range(1, 71) if is_each else ROWS:
                x = inputs(num_rows, 256)
                assert_right(form(x), x, matrix)
    x = inputs(600, 256)
    assert_right(form(x), x, matrix)


@pytest.mark.small(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_results_have_the_dtype_of_the_inputs(make: Make, bits: int, dtype: torch.dtype) -> None:
    """And are rounded to it once: weights and sums are float32."""
    matrix = random_matrix(bits, 65, 64, 32, has_offset=True)
    form, x = make(matrix), torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_right(form(x), x, matrix)


def test_weights_may_fill_several_tiles_and_odd_groups(make: Make) -> None:
    """More values than are dequantized at a time; and inputs of which no two share a byte."""
    for matrix in (
        random_matrix(4, 2100, 256, 32, has_offset=True),
        random_matrix(4, 65, 9, 3, has_offset=False),
        random_matrix(8, 65, 9, 9, has_offset=False),
    ):
        x = inputs(3, matrix.shape[1])
        assert_right(make(matrix)(x), x, matrix)


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_need_not_be_numbers_of_16_bits(make: Make, bits: int) -> None:
    matrix = random_matrix(bits, 65, 64, 16, has_offset=False)
    scales = torch.randn(65, 4, generator=torch.Generator().manual_seed(2))
    x = inputs(5, 64)
    for scale in (scales, scales.half().float()):
        own = replace(matrix, scale=scale)
        assert_right(make(own)(x), x, own)


@needs_numba
@pytest.mark.small(has_offset=[True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("has_offset", [False, True])
def test_panels_have_the_bits_of_float_panels(bits: int, has_offset: bool) -> None:
    from nanoserve.kernels.cpu.float_linear import FloatPanels

    for group_size in (256, *GROUP_SIZES):
        matrix = random_matrix(bits, 200, 256, group_size, has_offset=has_offset)
        form, floats = panels(matrix), FloatPanels(matrix.dequantize())
        for num_rows in (*ROWS, 600):
            x = inputs(num_rows, 256)
            assert torch.equal(form(x), floats(x))


@needs_numba
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_does_not_depend_on_its_neighbours(bits: int) -> None:
    """Bit for bit, as many and whichever they are: wherever a tile of rows begins and ends."""
    form, x = panels(random_matrix(bits, 200, 128, 32, has_offset=True)), inputs(600, 128)
    alone = torch.cat([form(row) for row in x.split(1)])
    for num_threads in (1, os.cpu_count()):
        with threads(num_threads):
            assert torch.equal(form(x), alone)
    for num_rows in range(1, 65):
        assert torch.equal(form(x[:num_rows]), alone[:num_rows]), num_rows
        assert torch.equal(form(x[num_rows:64]), alone[num_rows:64]), num_rows


def test_what_is_no_number_stays_in_its_row(make: Make) -> None:
    matrix = random_matrix(4, 65, 64, 32, has_offset=True)
    form, x = make(matrix), inputs(7, 64)
    expected, spoilt = form(x), x.clone()
    spoilt[1, 3], spoilt[4, 63] = torch.nan, torch.inf
    y = form(spoilt)
    assert y[1].isnan().all() and not y[4].isfinite().any()
    good = [0, 2, 3, 5, 6]
    assert torch.equal(y[good], expected[good])


def test_inputs_of_any_shape(make: Make) -> None:
    matrix = random_matrix(8, 65, 32, 32, has_offset=False)
    form, wide = make(matrix), torch.randn(10, 64, generator=torch.Generator().manual_seed(7))
    assert torch.equal(form(wide[:, ::2]), form(wide[:, ::2].contiguous()))
    assert_right(form(wide[3, :32])[None], wide[3:4, :32], matrix)
    cube = wide.view(4, 5, 32)
    assert torch.equal(form(cube), form(cube.view(20, 32)).view(4, 5, 65))
    assert form(wide[:0, :32]).shape == (0, 65)


def test_weights_keep_few_bits(make: Make) -> None:
    """A byte for two codes of 4 bits; the matrix that they came from is not kept."""
    kept = {}
    for bits in (8, 4):
        form = make(random_matrix(bits, 1280, 512, 128, has_offset=False))
        tensors = [t for tile in getattr(form, "_tiles", [vars(form).values()]) for t in tile]
        kept[bits] = sum(t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor))
    scales = 1280 * 4 * 4
    assert 1280 * 512 < kept[8] <= 1280 * 512 + scales
    assert 1280 * 256 < kept[4] <= 1280 * 256 + scales


def test_what_is_no_matrix_of_integers_in_runs_is_refused(make: Make) -> None:
    matrix = random_matrix(8, 4, 64, 32, has_offset=False)
    with pytest.raises(ValueError, match="sorted"):
        make(QuantizedMatrix(matrix.codes, matrix.scale, group_of_input=torch.arange(64) % 2))
    with pytest.raises(ValueError, match="8-bit floats"):
        make(replace(matrix, is_e4m3=True))
