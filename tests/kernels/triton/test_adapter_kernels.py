"""The products of adapters on a GPU: against float64, against the CPU's kernel, and their tiles.

Kernels are interpreted here; on a GPU: tests/gpu/test_lora_gpu.py.
"""

import interpreter
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from adapter_products import (
    CASES,
    TOLERANCE,
    Case,
    add,
    check_bits,
    check_products,
    draw,
    expected,
    layer_of,
)
from triton.runtime.errors import InterpreterError

from nanoserve.kernels.triton.low_rank import add_low_rank
from nanoserve.models.layers.adapter_tiles import TILE, PlaceTiles, most_tiles, tiles_of
from nanoserve.models.layers.low_rank import StepRows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
CPU = torch.device("cpu")


@pytest.mark.small(dtype=[torch.float32, torch.bfloat16], num_rows=[1, 23])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 23, 70])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_get_their_adapters_products(case: Case, num_rows: int, dtype: torch.dtype) -> None:
    check_products(case, num_rows, dtype, CPU)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_else_is_read_or_written(case: Case) -> None:
    """By a full tile, and by a graph's launch, whose last tiles are empty."""
    layer = layer_of(case, torch.float32)
    places, x, y = draw(case, 23, torch.float32)
    memory = PlaceTiles(40, len(case[2]), CPU)
    memory.fill(places)
    tiles, full = memory.views_of_graph(40), PlaceTiles(16, 1, CPU).fill(np.zeros(16, dtype=int))
    own = (x, y, layer.a, layer.b, layer.ends, layer.firsts, *tiles, *full)
    with interpreter.only_inside(*own):
        layer.add(x[:16], y[:16], StepRows([], full), add_low_rank)
        layer.add(x, y, StepRows([], tiles), add_low_rank)
        with pytest.raises(InterpreterError, match="addresses are outside"):
            layer.add(x.clone(), y, StepRows([], tiles), add_low_rank)


def test_inputs_whose_columns_are_apart() -> None:
    layer = layer_of(CASES[0], torch.float32)
    places, x, y = draw(CASES[0], 23, torch.float32)
    right = add(layer, x, y, places)
    assert torch.equal(add(layer, x.T.contiguous().T, y, places), right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_it_gives_what_the_kernel_for_cpus_gives(case: Case, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    from nanoserve.kernels.cpu import low_rank

    layer = layer_of(case, dtype)
    places, x, y = draw(case, 23, dtype)
    found, other = add(layer, x, y, places), y.clone()
    layer.add(x, other, StepRows.of(places, True, CPU), low_rank.add_low_rank)
    error = (found - other).abs().max() / other.abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row_depend_on_no_other(dtype: torch.dtype) -> None:
    check_bits(CASES[1], 40, dtype, CPU)


def test_empty_tiles_add_nothing() -> None:
    """A graph's launch has as many tiles as any step of its size; the step's own come first."""
    case = CASES[0]
    layer = layer_of(case, torch.float32)
    places, x, y = draw(case, 23, torch.float32)
    right, found = add(layer, x, y, places), y.clone()
    tiles = PlaceTiles(40, 4, CPU)
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
    tokens, of_tiles = PlaceTiles(3, 4, CPU).fill(places)
    for wrong_x, wrong_y, told in (
        (x[:, :-1], y, "do not fit"),
        (x, y.bfloat16(), "must be float32"),
        (x, y.T.contiguous().T, "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=told):
            layer.add(wrong_x, wrong_y, StepRows([], (tokens, of_tiles)), add_low_rank)
    with pytest.raises(ValueError, match="must have a row for each"):
        layer.add(x, y, StepRows([], (tokens, of_tiles[:-1])), add_low_rank)
