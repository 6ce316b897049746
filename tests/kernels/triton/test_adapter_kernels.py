"""The products of adapters on a GPU: against float64, against the CPU's kernel, and their tiles."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from nanoserve.kernels.triton.low_rank import add_low_rank
from nanoserve.models.layers.adapter_tiles import TILE, PlaceTiles, most_tiles, tiles_of
from nanoserve.models.layers.low_rank import AdaptedLayer, StepRows, Target

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the largest value of a result; float16 and bfloat16 round y once.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
Case = tuple[int, list[int], list[list[int]]]
# Inputs; the outputs of each target; by place the ranks of each target, 0 for none.
CASES: list[Case] = [
    (48, [64, 32, 32], [[4, 4, 4], [1, 0, 7], [0, 0, 0], [16, 16, 16]]),  # q, k, v
    (1100, [200], [[5], [64], [3]]),  # in two parts, of which the last is ragged
    (7, [5, 13], [[2, 3], [0, 1]]),  # less than a tile
    (33, [17], [[1]]),
    (130, [130, 129], [[64, 33], [0, 64], [70, 0]]),  # several blocks of ranks
]


def layer_of(case: Case, dtype: torch.dtype) -> AdaptedLayer:
    """Return a layer with an adapter in each place; what is not loaded is NaN."""
    inputs, outputs, ranks = case
    rng, targets, first = torch.Generator().manual_seed(0), [], 0
    for index, size in enumerate(outputs):
        whole, part = (size, inputs), slice(0, inputs)
        targets.append(Target(str(index), whole, slice(0, size), part, first))
        first += size
    zeros = partial(torch.zeros, dtype=dtype, device=DEVICE)
    layer = AdaptedLayer(targets, len(ranks), max(map(max, ranks)), zeros)
    layer.a.fill_(torch.nan)
    layer.b.fill_(torch.nan)
    for place, own in enumerate(ranks):
        pairs = {
            str(index): (
                torch.randn(rank, inputs, generator=rng).to(dtype),
                torch.randn(rank, outputs[index], generator=rng).to(dtype),
            )
            for index, rank in enumerate(own)
            if rank
        }
        layer.load(place, pairs)
    return layer


def draw(case: Case, num_rows: int, dtype: torch.dtype) -> tuple[np.ndarray, Tensor, Tensor]:
    """Return places by row, x and y, whose rows are apart."""
    inputs, outputs, ranks = case
    places = np.random.default_rng(num_rows).integers(-1, len(ranks), num_rows)
    places[0] = 0
    x = torch.randn(num_rows, inputs).to(DEVICE, dtype)
    return places, x, torch.randn(num_rows, sum(outputs) + 3).to(DEVICE, dtype)[:, :-3]


def add(layer: AdaptedLayer, x: Tensor, y: Tensor, places: np.ndarray) -> Tensor:
    """Return y with the products of its rows added, as a kernel has added them in place."""
    y = y.clone()
    tiles = PlaceTiles(len(x), len(layer.a), DEVICE).fill(places)
    layer.add(x, y, StepRows([], tiles), add_low_rank)
    return y


def expected(layer: AdaptedLayer, x: Tensor, y: Tensor, places: np.ndarray) -> Tensor:
    """Compute the result in float64."""
    out, ends = y.double(), layer.ends.tolist()
    for row, place in enumerate(places.tolist()):
        for index, target in enumerate(layer.targets):
            start, end = ends[place][index : index + 2]
            if place >= 0 and start < end:
                a = layer.a[place, :, start:end].double()
                b = layer.b[place, : end - start, target.columns].double()
                out[row, target.columns] += x[row].double() @ a @ b
    return out


@pytest.mark.small(dtype=[torch.float32, torch.bfloat16], num_rows=[1, 23])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 23, 70])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_get_their_adapters_products(case: Case, num_rows: int, dtype: torch.dtype) -> None:
    layer = layer_of(case, dtype)
    places, x, y = draw(case, num_rows, dtype)
    found, right = add(layer, x, y, places), expected(layer, x, y, places)
    error = (found.double() - right).abs().max() / right.abs().max()
    assert error < TOLERANCE[dtype]  # no NaN, either
    assert torch.equal(found[places < 0], y[places < 0])
    for place, own in enumerate(case[2]):
        for target, rank in zip(layer.targets, own, strict=True):
            if rank == 0:
                rows = np.flatnonzero(places == place)
                assert torch.equal(found[rows, target.columns], y[rows, target.columns])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="compares with a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_it_gives_what_the_kernel_for_cpus_gives(case: Case, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    from nanoserve.kernels.cpu import low_rank

    layer = layer_of(case, dtype)
    places, x, y = draw(case, 23, dtype)
    found, other = add(layer, x, y, places), y.clone()
    layer.add(x, other, StepRows.of(places, True, DEVICE), low_rank.add_low_rank)
    error = (found - other).abs().max() / other.abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row_depend_on_no_other(dtype: torch.dtype) -> None:
    case = CASES[1]
    layer = layer_of(case, dtype)
    places, x, y = draw(case, 40, dtype)
    together = add(layer, x, y, places)
    for row in range(0, 40, 7):
        alone = slice(row, row + 1)
        assert torch.equal(add(layer, x[alone], y[alone], places[alone])[0], together[row]), row


def test_empty_tiles_add_nothing() -> None:
    """A graph's launch has as many tiles as any step of its size; the step's own come first."""
    case = CASES[0]
    layer = layer_of(case, torch.float32)
    places, x, y = draw(case, 23, torch.float32)
    right, found = add(layer, x, y, places), y.clone()
    tiles = PlaceTiles(40, 4, DEVICE)
    recorded = StepRows([], tiles.views(most_tiles(40, 4)))
    for of_step, result in ((np.full(40, 1), None), (places, right), (np.full(40, -1), right)):
        tiles.fill(of_step)
        if result is not None:
            layer.add(x, found, recorded, add_low_rank)
            assert torch.equal(found, result)
    with pytest.raises(ValueError, match="100 tokens take 7 tiles, of 6"):
        tiles.fill(np.zeros(100, dtype=np.int32))


def test_an_adapter_replaces_the_one_before_it() -> None:
    case = CASES[0]
    layer = layer_of(case, torch.float32)
    places, x, y = draw(case, 5, torch.float32)
    only_last = {"2": (torch.randn(2, 48), torch.randn(2, 32))}
    layer.load(0, only_last)
    found = add(layer, x, y, places)
    assert torch.allclose(found.double(), expected(layer, x, y, places), rtol=1e-5, atol=1e-5)
    layer.load(0, {})
    alone = np.where(places == 0, 0, -1)
    assert torch.equal(add(layer, x, y, alone), y)


@pytest.mark.parametrize("num_places", [1, 3, 8])
def test_tiles_have_each_token_once(num_places: int) -> None:
    rng = np.random.default_rng(num_places)
    for num_tokens in (1, 2, 15, 16, 17, 100):
        places = rng.integers(-1, num_places, num_tokens)
        tokens, of_tiles = tiles_of(places)
        assert tokens.shape == (len(of_tiles), TILE) and tokens.dtype == of_tiles.dtype == np.int32
        assert len(of_tiles) <= most_tiles(num_tokens, num_places)
        assert sorted(tokens[tokens >= 0].tolist()) == np.flatnonzero(places >= 0).tolist()
        for own, place in zip(tokens, of_tiles, strict=True):
            assert own[0] >= 0 and set(places[own[own >= 0]]) == {place}
    assert most_tiles(1, 8) == 1 and most_tiles(64, 1) == 4 and most_tiles(64, 64) == 64
    # The most that there can be: of each adapter a tile has one token.
    worst = np.array([place for place in range(num_places) for _ in range(17)])
    assert len(tiles_of(worst)[1]) == most_tiles(len(worst), num_places)


def test_unsuitable_arguments_are_refused() -> None:
    layer = layer_of(CASES[0], torch.float32)
    places, x, y = draw(CASES[0], 3, torch.float32)
    for wrong_x, wrong_y, told in (
        (x[:, :-1], y, "do not fit"),
        (x, y.bfloat16(), "must be float32"),
        (x, y.T.contiguous().T, "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=told):
            add(layer, wrong_x, wrong_y, places)
    tokens, of_tiles = PlaceTiles(3, 4, DEVICE).fill(places)
    with pytest.raises(ValueError, match="must have a row for each"):
        layer.add(x, y, StepRows([], (tokens, of_tiles[:-1])), add_low_rank)
