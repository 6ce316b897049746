"""The products of adapters: the kernel and torch's products against float64."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.models.layers.low_rank import _GROUP, AdaptedLayer, StepRows, Target

pytest.importorskip("numba")

from nanoserve.kernels.cpu.cpu_features import has
from nanoserve.kernels.cpu.low_rank import add_low_rank, compile_low_rank
from nanoserve.kernels.cpu.low_rank_tiles import GROUP, KINDS, best_kind

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAIRS = "pairs of bfloat16"
needs_pairs = pytest.mark.skipif(not has("avx512bf16"), reason="needs AVX-512 BF16")
by_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_pairs if kind == PAIRS else ()) for kind in KINDS]
)
Layer = tuple[AdaptedLayer, dict[int, dict[str, tuple[Tensor, Tensor]]]]


def layer_of(
    inputs: int, outputs: list[int], ranks: list[list[int]], dtype: torch.dtype, seed: int = 0
) -> Layer:
    """Return a layer with an adapter in each place, of these ranks by output; 0 is none."""
    rng, targets, first = torch.Generator().manual_seed(seed), [], 0
    for index, size in enumerate(outputs):
        whole = (size, inputs)
        targets.append(Target(str(index), whole, slice(0, size), slice(0, inputs), first))
        first += size
    largest = max(map(max, ranks))
    layer = AdaptedLayer(targets, len(ranks), largest, partial(torch.zeros, dtype=dtype))
    layer.a.fill_(torch.nan)  # what is not loaded must not be read
    layer.b.fill_(torch.nan)
    adapters = {}
    for place, own in enumerate(ranks):
        adapters[place] = {
            str(index): (
                torch.randn(rank, inputs, generator=rng).to(dtype),
                torch.randn(rank, outputs[index], generator=rng).to(dtype),
            )
            for index, rank in enumerate(own)
            if rank
        }
        layer.load(place, adapters[place])
    return layer, adapters


def expected(
    layer: Layer, x: Tensor, y: Tensor, places: np.ndarray, is_rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the result in float64, and how far float32 sums may be from it.

    is_rounded: A x, too, is rounded to the data type.
    """
    own, adapters = layer
    out, bound, unit = y.double(), torch.zeros(y.shape).double(), torch.finfo(y.dtype).eps / 2
    for row, place in enumerate(places.tolist()):
        for target in own.targets:
            if place >= 0 and target.name in adapters[place]:
                a, b = (one.double() for one in adapters[place][target.name])
                narrow, summed = a @ x[row].double(), a.abs() @ x[row].double().abs()
                out[row, target.columns] += narrow @ b
                bound[row, target.columns] += (1e-5 * summed) @ b.abs()
                if is_rounded:
                    bound[row, target.columns] += unit * narrow.abs() @ b.abs()
    return out, bound + unit * (1 + 1e-5) * out.abs()


CASES = [
    (48, [64, 32, 32], [[4, 4, 4], [1, 0, 7], [0, 0, 0], [16, 16, 16]]),
    (80, [48], [[5], [64], [3]]),
    (7, [5, 13], [[2, 3], [0, 1]]),
    (33, [17], [[1]]),
    (1, [130], [[1], [2]]),
]


@by_kind
@pytest.mark.parametrize("scale", [0.01, 1, 100])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_rounds_only_what_it_says(
    case: tuple[int, list[int], list[list[int]]], kind: str, scale: float
) -> None:
    inputs, outputs, ranks = case
    dtype = DTYPES[KINDS[kind].dtype]
    layer = layer_of(inputs, outputs, ranks, dtype)
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, 5, 23, 60):
        places = rng.integers(-1, len(ranks), num_rows)
        places[0] = 0
        x = (scale * torch.randn(num_rows, inputs)).to(dtype)
        whole = torch.randn(num_rows, sum(outputs) + 3).to(dtype)
        y = whole[:, : sum(outputs)]  # its rows are apart
        before = whole.clone()
        right, bound = expected(layer, x, y, places, kind == PAIRS)
        rows = StepRows.of(places, True, CPU)
        layer[0].add(x, y, rows, partial(add_low_rank, kind=kind))
        assert ((y.double() - right).abs() <= bound).all()
        assert torch.equal(whole[places < 0], before[places < 0])
        assert torch.equal(whole[:, sum(outputs) :], before[:, sum(outputs) :])


@pytest.mark.parametrize("kernel", [add_low_rank, None], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_get_their_adapters_products(
    case: tuple[int, list[int], list[list[int]]],
    dtype: torch.dtype,
    kernel: Callable[..., None] | None,
) -> None:
    inputs, outputs, ranks = case
    layer = layer_of(inputs, outputs, ranks, dtype)
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, 5, 23):
        places = rng.integers(-1, len(ranks), num_rows)
        places[0] = 0
        x = torch.randn(num_rows, inputs).to(dtype)
        whole = torch.randn(num_rows, sum(outputs) + 3).to(dtype)
        y = whole[:, : sum(outputs)]  # its rows are apart
        before, right = y.clone(), expected(layer, x, y, places)[0]
        rows = StepRows.of(places, kernel is not None, CPU)
        layer[0].add(x, y, rows, kernel)
        error = (y.double() - right).abs().max() / right.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 0.02)
        without = places < 0
        assert torch.equal(y[without], before[without])


@by_kind
def test_the_bits_of_a_row_depend_on_no_other(kind: str) -> None:
    """y is minus the products, so what is left of them are the last bits of float32 sums."""
    dtype = DTYPES[KINDS[kind].dtype]
    layer, _ = layer_of(49, [64, 20], [[9, 3], [16, 5]], dtype)
    x = torch.randn(31, 49).to(dtype)
    for numbers in (x, layer.a, layer.b):  # of many sizes, or all sums would be exact
        numbers *= (2.0 ** torch.randint(-9, 9, numbers.shape)).to(dtype)
    kernel, places = partial(add_low_rank, kind=kind), np.array([0, 1, 0, 0, -1, 0, 0, 0, 0, 0] * 3)
    places = np.append(places, 1)
    y = torch.zeros(31, 84, dtype=dtype)
    layer.add(x, y, StepRows.of(places, True, CPU), kernel)
    y.neg_()
    together = y.clone()
    layer.add(x, together, StepRows.of(places, True, CPU), kernel)
    for size in range(1, GROUP + 1):  # groups of all sizes, from rows at different places
        for own in (torch.arange(31).split(size), torch.randperm(31).split(size)):
            for rows in own:
                some, of_rows = y[rows], places[rows.numpy()]
                if (of_rows >= 0).any():
                    layer.add(x[rows], some, StepRows.of(of_rows, True, CPU), kernel)
                assert torch.equal(some, together[rows]), size


@by_kind
def test_pairs_take_subnormal_numbers_for_zero(kind: str) -> None:
    """A x is 2^-132, which only the other kinds multiply by 2^100; the second target has 2^-125."""
    dtype = DTYPES[KINDS[kind].dtype]
    layer, _ = layer_of(2, [16, 16], [[1, 1]], dtype)
    layer.a[0, :, :2], layer.b[0] = torch.tensor([[2.0**-66, 2.0**-59], [0, 0]]), 2.0**100
    y = torch.zeros(1, 32, dtype=dtype)
    x = torch.tensor([[2.0**-66, 1.0]], dtype=dtype)
    layer.add(x, y, StepRows.of(np.array([0]), True, CPU), partial(add_low_rank, kind=kind))
    assert (y[0, :16] == (0 if kind == PAIRS else 2.0**-32)).all()
    assert (y[0, 16:] == 2.0**-25).all()


def test_the_layer_makes_groups_of_the_kernels_size() -> None:
    assert _GROUP == GROUP  # the layer does not import the kernel; larger groups would not fit
    assert best_kind("float32") == "singles of float32"
    assert best_kind("bfloat16") == (PAIRS if has("avx512bf16") else "singles of bfloat16")


def test_an_adapter_replaces_the_one_before_it() -> None:
    layer, adapters = layer_of(16, [16, 16], [[4, 4], [2, 2]], torch.float32)
    only_second = {"1": adapters[1]["1"]}
    layer.load(0, only_second)
    x, y = torch.randn(1, 16), torch.zeros(1, 32)
    layer.add(x, y, StepRows.of(np.array([0]), True, CPU), add_low_rank)
    assert not y[:, :16].any() and y[:, 16:].any()
    layer.load(0, {})
    layer.load(1, {})
    assert not layer.is_used


def test_unsuitable_arguments_are_refused() -> None:
    layer, _ = layer_of(16, [16], [[4]], torch.float32)
    rows = StepRows.of(np.array([0, 0]), True, CPU)
    with pytest.raises(ValueError, match="strides"):
        layer.add(torch.randn(2, 16), torch.zeros(16, 2).T, rows, add_low_rank)
    compile_low_rank(torch.float32)


USES_MEMORY = """
import torch
from nanoserve.kernels.cpu.low_rank import add_low_rank
ends, firsts = (torch.tensor(one, dtype=torch.int32) for one in ([[0, 16]], [0, 64]))
x, a, b = torch.randn(1, 9000), torch.randn(1, 9000, 16), torch.randn(1, 16, 64)
x, y, a, b = (one.to(getattr(torch, DTYPE)) for one in (x, torch.zeros(1, 64), a, b))
rows = [torch.tensor(one, dtype=torch.int32) for one in ([0], [0, 1], [0])]
add_low_rank(x, y, a, b, ends, firsts, *rows, kind=KIND)
right = x.double() @ a[0].double() @ b[0].double()
assert (y.double() - right).abs().max() < 0.02 * right.abs().max()
"""


@by_kind
def test_memory_is_used_before_it_is_freed(kind: str) -> None:
    """The C library writes on what is freed; else the numbers would be there for a while."""
    environment = os.environ | {"MALLOC_PERTURB_": "165"}
    script = f"KIND, DTYPE = {kind!r}, {KINDS[kind].dtype!r}\n{USES_MEMORY}"
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
