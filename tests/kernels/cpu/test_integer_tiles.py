"""Products of integers against exact ones, over the whole range of codes and of inputs.

The range is the point: where AVX2 multiplies unsigned by signed bytes, it cuts sums of pairs off at
16 bits, which codes in the middle of their range never reach.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from integer_weights import assert_product, random_codes, random_matrix

pytest.importorskip("numba")

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.integer_linear import IntegerPanels, best_kind
from nanoserve.kernels.cpu.isa import KINDS, kinds_here
from nanoserve.worker.threads import threads

BITS = (8, 4)
GROUP_SIZES = (128, 64, 32, 16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two of them in each of several test processes would wait for each other."""
    with threads(1):
        yield


def small_kinds() -> list[str]:
    """The best of each number of bits, and another: each is compiled for seconds.

    Short ones are half of the vectors of another kind.
    """
    of_bytes, of_nibbles = (
        [name for name in kinds_here() if KINDS[name].bits == bits and not name.startswith("short")]
        for bits in BITS
    )
    return [*of_bytes[:2], of_nibbles[0]]


@pytest.fixture(scope="module")
def compiled(full_size: bool) -> list[str]:
    return kinds_here() if full_size else small_kinds()


def sized(name: str) -> Any:
    is_large = name in kinds_here() and name not in small_kinds()
    return pytest.param(name, marks=[pytest.mark.size("full")] * is_large)


@pytest.fixture(params=map(sized, KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    if request.param not in kinds_here():
        pytest.skip("this processor has no instructions for it")
    return request.param


def test_sums_are_exact_at_the_ends_of_the_range(kind: str, full_size: bool) -> None:
    """One group, scale 1: every product is an integer below 2^24, which float32 has."""
    bits, ones = KINDS[kind].bits, torch.ones(65, 1)
    # A kernel is compiled for each of them, for seconds.
    for inputs in (1, 2, 3, 8, 32, 96, 130, 1024) if full_size else (3, 96, 1024):
        if not KINDS[kind].takes(inputs):
            continue
        codes = random_matrix(bits, 65, inputs, inputs, has_offset=False).codes
        matrix, x = QuantizedMatrix(codes, ones, bits=bits), random_codes(13, inputs)
        expected = (x.long() @ codes.long().T).float()
        assert expected.abs().max() < 2**24
        expected *= float(np.float32(127) * np.float32(1 / 127))  # the groups' scale
        assert torch.equal(IntegerPanels(*matrix.operands(), kind=kind)(x), expected), inputs


@pytest.mark.small(has_offset=[False])
@pytest.mark.parametrize("has_offset", [False, True])
def test_products_are_those_of_the_definition(kind: str, has_offset: bool, full_size: bool) -> None:
    bits = KINDS[kind].bits
    for group_size in (256, *GROUP_SIZES):
        if not KINDS[kind].takes(group_size):
            continue
        for outputs in (1, 63, 64, 65, 200) if full_size else (65, 200):
            matrix = random_matrix(bits, outputs, 256, group_size, has_offset=has_offset)
            form = IntegerPanels(*matrix.operands(), kind=kind)
            # Rows are tiled alike in all panels: every number of them in two of these.
            is_each = full_size and outputs == 65
            for num_rows in range(1, 71) if is_each else (1, 2, 3, 5, 7, 70):
                x = random_codes(num_rows, 256, seed=num_rows)
                assert_product(form(x), matrix, x)
    x = random_codes(600, 256)
    assert_product(form(x), matrix, x)


@pytest.mark.size("full")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("has_offset", [False, True])
def test_the_best_kinds_have_offsets(bits: int, has_offset: bool) -> None:
    for group_size in GROUP_SIZES:
        matrix = random_matrix(bits, 100, 256, group_size, has_offset=has_offset)
        x = random_codes(9, 256)
        assert_product(IntegerPanels(*matrix.operands())(x), matrix, x)


@pytest.mark.size("full")
@pytest.mark.parametrize("bits", BITS)
def test_scales_that_are_numbers_of_16_bits_are_kept_in_16(bits: int) -> None:
    for group_size in GROUP_SIZES:
        matrix = random_matrix(bits, 100, 256, group_size, has_offset=False)
        matrix, x = replace(matrix, scale=matrix.scale.half().float()), random_codes(9, 256)
        form = IntegerPanels(*matrix.operands())
        assert form.scale.dtype == torch.float16
        assert_product(form(x), matrix, x)
        matrix.scale[99, -1] = 1 / 3  # of which one is none
        form = IntegerPanels(*matrix.operands())
        assert form.scale.dtype == torch.float32
        assert_product(form(x), matrix, x)


@pytest.mark.parametrize("bits", BITS)
def test_all_kinds_give_the_same_bits(bits: int, compiled: list[str]) -> None:
    """So an answer does not depend on which of them a processor has."""

    def kinds_of(bits: int, group_size: int) -> list[str]:
        return [n for n in compiled if KINDS[n].bits == bits and KINDS[n].takes(group_size)]

    for group_size in (256, *GROUP_SIZES):
        matrix = random_matrix(bits, 65, 256, group_size, has_offset=False)
        x = torch.randn(13, 256, generator=torch.Generator().manual_seed(2))
        kinds = kinds_of(bits, group_size) + (kinds_of(8, group_size) if bits == 4 else [])
        first, *others = (IntegerPanels(*matrix.operands(), kind=name)(x) for name in kinds)
        assert len(others) > 0 and all(torch.equal(first, other) for other in others), kinds


def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    """300 rows are also made integers by several threads, fewer by one."""
    matrix = random_matrix(KINDS[kind].bits, 100, 128, 32, has_offset=False)
    x = torch.randn(300, 128, generator=torch.Generator().manual_seed(3))
    form = IntegerPanels(*matrix.operands(), kind=kind)
    alone = torch.cat([form(row) for row in x.split(1)])
    for num_threads in (1, os.cpu_count()):
        with threads(num_threads):
            assert torch.equal(form(x), alone)
    for num_rows in range(1, 65):
        assert torch.equal(form(x[:num_rows]), alone[:num_rows]), num_rows
        assert torch.equal(form(x[num_rows:64]), alone[num_rows:64]), num_rows


@pytest.mark.small(bits=[4])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [64, 48])
def test_groups_of_inputs_become_the_nearest_of_255_integers(bits: int, inputs: int) -> None:
    """Of any size: each has its own scale. 48 have groups of 24, which make no whole vectors."""
    matrix = random_matrix(bits, 64, inputs, inputs, has_offset=True)
    x = torch.randn(20, inputs, generator=torch.Generator().manual_seed(4))
    x[:, : inputs // 2] *= 10.0 ** torch.arange(-10, 10)[:, None]
    groups = x.double().unflatten(1, (2, -1))
    largest = groups.abs().amax(dim=2, keepdim=True)
    nearest = ((groups / largest * 127).round() / 127 * largest).flatten(1)
    exact = nearest @ matrix.dequantize().double().T
    bound = 4e-6 * (nearest.abs() @ matrix.dequantize().double().abs().T)
    assert ((IntegerPanels(*matrix.operands())(x).double() - exact).abs() <= bound).all()


@pytest.mark.small(bits=[4])
@pytest.mark.parametrize("bits", BITS)
def test_a_large_input_leaves_the_groups_beside_it_as_they_are(bits: int) -> None:
    """Its weights are zero: a scale for a whole row would round all other inputs to zero."""
    matrix = random_matrix(bits, 65, 96, 96, has_offset=False)
    codes = matrix.codes.clone()
    codes[:, 40] = 0
    form = IntegerPanels(*replace(matrix, codes=codes).operands())
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(8))
    x[:, 32:64] = 0
    expected = form(x)
    x[:, 40] = 25_000 * x.abs().median()
    assert torch.equal(form(x), expected)


@pytest.mark.size("full")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_results_have_the_dtype_of_the_inputs(bits: int, dtype: torch.dtype) -> None:
    matrix, x = random_matrix(bits, 65, 64, 32, has_offset=False), random_codes(7, 64)
    y = IntegerPanels(*matrix.operands())(x.to(dtype))  # integers up to 127 are exact in both
    assert y.dtype == dtype
    assert_product(y, matrix, x)


@pytest.mark.parametrize("bits", BITS)
def test_what_is_no_number_makes_its_own_row_none(bits: int) -> None:
    matrix = random_matrix(bits, 65, 64, 32, has_offset=False)
    x = torch.randn(600, 64, generator=torch.Generator().manual_seed(5))
    form = IntegerPanels(*matrix.operands())
    for rows, num_threads in ((x[:7], 1), (x, os.cpu_count())):
        expected, spoilt = form(rows), rows.clone()
        spoilt[1, 3], spoilt[3, 63], spoilt[5, 0] = torch.nan, torch.inf, -torch.inf
        with threads(num_threads):
            y = form(spoilt)
        assert y[[1, 3, 5]].isnan().all()
        good = [i for i in range(len(rows)) if i not in (1, 3, 5)]
        assert torch.equal(y[good], expected[good])


@pytest.mark.small(bits=[4])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_of_zeros_gives_zeros(bits: int) -> None:
    matrix = random_matrix(bits, 65, 64, 32, has_offset=True)
    x = torch.zeros(3, 64)
    x[1, 5] = 1e-20
    y = IntegerPanels(*matrix.operands())(x)
    assert torch.equal(y[::2], torch.zeros(2, 65)) and (y[1] != 0).all()


@pytest.mark.small(bits=[4])
@pytest.mark.parametrize("bits", BITS)
def test_parts_of_a_row_add_up_to_the_row(bits: int) -> None:
    """Which is what ranks do that each have some of the inputs. 96 cuts a group of 64 in two."""
    matrix = random_matrix(bits, 65, 256, 64, has_offset=True)
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(6))
    x[3, 100], x[5, :] = 9, 0
    parts = [
        IntegerPanels(*matrix.columns(first, end).operands())(x[:, first:end])
        for first, end in ((0, 96), (96, 256))
    ]
    magnitudes = x.abs() @ matrix.dequantize().abs().T
    assert ((sum(parts) - IntegerPanels(*matrix.operands())(x)).abs() <= 2e-6 * magnitudes).all()


def test_inputs_of_any_shape() -> None:
    form = IntegerPanels(*random_matrix(8, 65, 32, 32, has_offset=False).operands())
    wide = torch.randn(10, 64, generator=torch.Generator().manual_seed(7))
    assert torch.equal(form(wide[:, ::2]), form(wide[:, ::2].contiguous()))
    assert torch.equal(form(wide[3, :32]), form(wide[3:4, :32])[0])
    cube = wide.view(4, 5, 32)
    assert torch.equal(form(cube), form(cube.view(20, 32)).view(4, 5, 65))
    assert form(wide[:0, :32]).shape == (0, 65)


@pytest.mark.size("full")
def test_groups_that_no_kind_of_4_bits_takes_are_those_of_8() -> None:
    assert KINDS[best_kind(4, 32)].bits == 4
    assert KINDS[best_kind(4, 3)].bits == 8
    matrix, x = random_matrix(4, 65, 9, 3, has_offset=False), random_codes(5, 9)
    assert_product(IntegerPanels(*matrix.operands())(x), matrix, x)


def test_the_best_kind_is_the_one_that_takes_most_at_a_time() -> None:
    assert set(kinds_here()) <= set(KINDS) and kinds_here()[-2:] == ["bytes", "nibbles"]
    if has("avx512vnni"):
        assert (best_kind(8, 64), best_kind(4, 64)) == ("dots of bytes", "dots of nibbles")
    if has("avx2"):
        assert best_kind(8, 2) == "pairs of bytes"


def test_groups_that_are_no_runs_are_refused() -> None:
    matrix = random_matrix(8, 4, 64, 32, has_offset=False)
    order = torch.arange(64) % 2
    with pytest.raises(ValueError, match="sorted"):
        QuantizedMatrix(matrix.codes, matrix.scale, group_of_input=order).operands()
