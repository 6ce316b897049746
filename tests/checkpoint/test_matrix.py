"""The canonical integer matrix against plain torch: its values, its parts, its order of inputs."""

from dataclasses import replace

import pytest
import torch
from integer_weights import random_matrix
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix, stack_rows

offsets = pytest.mark.parametrize("has_offset", [False, True])
orders = pytest.mark.parametrize("is_ordered", [False, True], ids=["runs", "act order"])


def make(has_offset: bool, is_ordered: bool = False, seed: int = 0) -> QuantizedMatrix:
    """[10, 96] in groups of 32."""
    matrix = random_matrix(4, 10, 96, 32, has_offset=has_offset, seed=seed)
    if not is_ordered:
        return matrix
    group = torch.randperm(96, generator=torch.Generator().manual_seed(1)) % 3
    return replace(matrix, group_of_input=group.int())


def by_definition(matrix: QuantizedMatrix) -> Tensor:
    """Element by element."""
    out, num_inputs = matrix.codes.shape
    weight = torch.zeros(out, num_inputs)
    for n in range(out):
        for k in range(num_inputs):
            g = k // 32 if matrix.group_of_input is None else int(matrix.group_of_input[k])
            weight[n, k] = matrix.codes[n, k] * matrix.scale[n, g]
            if matrix.offset is not None:
                weight[n, k] += matrix.offset[n, g]
    return weight


@offsets
@orders
def test_it_means_what_its_definition_says(has_offset: bool, is_ordered: bool) -> None:
    matrix = make(has_offset, is_ordered)
    assert torch.equal(matrix.dequantize(), by_definition(matrix))
    assert (matrix.shape, matrix.group_size) == ((10, 96), 32)


@offsets
@orders
def test_outputs_are_those_of_torch(has_offset: bool, is_ordered: bool) -> None:
    matrix = make(has_offset, is_ordered)
    weight = matrix.dequantize()
    for first, end in ((0, 10), (0, 1), (3, 7), (9, 10), (4, 4)):
        assert torch.equal(matrix.rows(first, end).dequantize(), weight[first:end])
    for num_rows in (1, 3, 5, 10, 20):
        parts = [part.dequantize() for part in matrix.split(num_rows)]
        expected = weight.split(num_rows)
        assert len(parts) == len(expected)
        assert all(map(torch.equal, parts, expected))


@offsets
@orders
def test_inputs_are_those_of_torch_also_where_groups_are_cut(
    has_offset: bool, is_ordered: bool
) -> None:
    matrix = make(has_offset, is_ordered)
    weight = matrix.dequantize()
    for first, end in ((0, 96), (0, 32), (32, 96), (0, 48), (48, 96), (8, 88), (1, 2), (95, 96)):
        part = matrix.columns(first, end)
        assert torch.equal(part.dequantize(), weight[:, first:end]), (first, end)
    if not is_ordered:
        sizes = [matrix.columns(*ends).group_size for ends in ((32, 96), (48, 96), (8, 88), (3, 9))]
        assert sizes == [32, 16, 8, 1]  # no smaller than they must be: they cost time


@offsets
def test_inputs_in_runs_give_the_same_product(has_offset: bool) -> None:
    matrix = make(has_offset, is_ordered=True)
    runs, order = matrix.in_runs()
    assert runs.group_of_input is None and sorted(order.tolist()) == list(range(96))
    assert torch.equal(runs.dequantize(), matrix.dequantize()[:, order])
    x = torch.randn(3, 96, dtype=torch.float64)
    product = x[:, order] @ runs.dequantize().double().T
    torch.testing.assert_close(product, x @ matrix.dequantize().double().T)
    plain = make(has_offset)
    assert plain.in_runs() == (plain, None)


def test_groups_of_unequal_sizes_have_no_runs() -> None:
    matrix = replace(make(False), group_of_input=torch.arange(96) // 40)
    with pytest.raises(ValueError, match="16 to 40 inputs"):
        matrix.in_runs()
    first = replace(make(False), group_of_input=torch.arange(96) // 32).columns(0, 32)
    with pytest.raises(ValueError, match="0 to 32 inputs"):  # a rank has one group of the three
        first.in_runs()


@pytest.mark.parametrize("has_offsets", [(False, False), (True, True), (False, True)], ids=str)
@orders
def test_outputs_are_stacked_as_integers(has_offsets: tuple[bool, bool], is_ordered: bool) -> None:
    parts = [make(has, is_ordered, seed) for seed, has in enumerate(has_offsets)]
    stacked = stack_rows(parts)
    assert isinstance(stacked, QuantizedMatrix) and stacked.bits == 4
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert stack_rows([parts[0]]) is parts[0]
    wide = random_matrix(8, 5, 96, 32, has_offset=False)
    if not is_ordered:
        assert stack_rows([parts[0], wide]).bits == 8


def test_unlike_outputs_are_stacked_as_numbers() -> None:
    plain, matrix, ordered = torch.randn(4, 96), make(True), make(True, is_ordered=True)
    other = replace(ordered, group_of_input=ordered.group_of_input.flip(0))
    fewer = random_matrix(4, 5, 96, 96, has_offset=False)
    for first, second in ((matrix, plain), (matrix, ordered), (ordered, other), (matrix, fewer)):
        for parts in ([first, second], [second, first]):
            stacked = stack_rows(parts)
            floats = [p if isinstance(p, Tensor) else p.dequantize() for p in parts]
            assert isinstance(stacked, Tensor) and torch.equal(stacked, torch.cat(floats))
    assert torch.equal(stack_rows([plain, plain]), torch.cat([plain, plain]))


CODES, SCALE = torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": CODES.to(torch.uint8)}, "codes must be int8 .* not torch.uint8"),
        ({"bits": 5}, "bits=4 or 8, not torch.int8 with bits=5"),
        ({"scale": SCALE.double()}, r"scale must be float32 \[4, 2\], not torch.float64"),
        ({"scale": SCALE[:3]}, r"scale must be float32 \[4, 2\], not torch.float32 \[3, 2\]"),
        ({"offset": SCALE[:, :1]}, r"offset must be float32 \[4, 2\], not torch.float32 \[4, 1\]"),
        ({"offset": SCALE.half()}, "offset must be float32 .* not torch.float16"),
        ({"scale": torch.ones(4, 3)}, "32 inputs cannot be divided into 3 groups"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedMatrix(**{"codes": CODES, "scale": SCALE} | changes)
