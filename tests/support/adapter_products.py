"""Products of adapters by the kernels of a GPU: cases, and what is right."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanoserve.kernels.triton.low_rank import add_low_rank
from nanoserve.models.layers.adapter_tiles import PlaceTiles
from nanoserve.models.layers.low_rank import AdaptedLayer, StepRows, Target

# Of the largest value of a result; float16 and bfloat16 round y once.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
BORDER = 7.0  # around y: other rows and columns of a larger matrix
CPU = torch.device("cpu")
Case = tuple[int, list[int], list[list[int]]]
# Inputs; the outputs of each target; by place the ranks of each target, 0 for none.
CASES: list[Case] = [
    (48, [64, 32, 32], [[4, 4, 4], [1, 0, 7], [0, 0, 0], [16, 16, 16]]),  # q, k, v
    (1100, [200], [[5], [64], [3]]),  # in two parts, of which the last is ragged
    (7, [5, 13], [[2, 3], [0, 1]]),  # less than a tile
    (33, [17], [[1]]),
    (130, [130, 129], [[64, 33], [0, 64], [70, 0]]),  # several blocks of ranks
]


def layer_of(case: Case, dtype: torch.dtype, device: torch.device = CPU) -> AdaptedLayer:
    """Return a layer with an adapter in each place; what is not loaded is NaN."""
    inputs, outputs, ranks = case
    rng, targets, first = torch.Generator().manual_seed(0), [], 0
    for index, size in enumerate(outputs):
        whole, part = (size, inputs), slice(0, inputs)
        targets.append(Target(str(index), whole, slice(0, size), part, first))
        first += size
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    layer = AdaptedLayer(targets, len(ranks), max(map(max, ranks)), zeros)
    layer.a.fill_(torch.nan)
    layer.b.fill_(torch.nan)
    for place, own in enumerate(ranks):
        pairs = {
            str(index): (
                torch.randn(rank, inputs, generator=rng).to(device, dtype),
                torch.randn(rank, outputs[index], generator=rng).to(device, dtype),
            )
            for index, rank in enumerate(own)
            if rank
        }
        layer.load(place, pairs)
    return layer


def draw(
    case: Case, num_rows: int, dtype: torch.dtype, device: torch.device = CPU
) -> tuple[np.ndarray, Tensor, Tensor]:
    """Return places by row, x, whose rows are apart and beside NaN, and y."""
    inputs, outputs, ranks = case
    places = np.random.default_rng(num_rows).integers(-1, len(ranks), num_rows)
    places[0] = 0
    x = torch.full((num_rows + 2, inputs + 3), torch.nan, device=device, dtype=dtype)
    x[1:-1, :-3] = torch.randn(num_rows, inputs)
    y = torch.randn(num_rows, sum(outputs)).to(device, dtype)
    y[:, ::5] = -0.0  # to which nothing may be added, not even 0
    return places, x[1:-1, :-3], y


def add(layer: AdaptedLayer, x: Tensor, y: Tensor, places: np.ndarray) -> Tensor:
    """Return y with the products of its rows added, as a kernel has added them in place.

    y is inside of a larger matrix, of which nothing else may change.
    """
    whole = torch.full((len(y) + 2, y.shape[1] + 3), BORDER, device=y.device, dtype=y.dtype)
    inside = whole[1:-1, :-3]
    inside.copy_(y)
    tiles = PlaceTiles(len(x), len(layer.a), y.device).fill(places)
    layer.add(x, inside, StepRows([], tiles), add_low_rank)
    assert bool((whole[[0, -1]] == BORDER).all()) and bool((whole[:, -3:] == BORDER).all())
    return inside.clone()


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


def check_products(case: Case, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compare with float64; what no adapter changes has the same bits."""
    layer = layer_of(case, dtype, device)
    places, x, y = draw(case, num_rows, dtype, device)
    found, right = add(layer, x, y, places), expected(layer, x, y, places)
    error = (found.double() - right).abs().max() / right.abs().max()
    assert error < TOLERANCE[y.dtype]  # no NaN, either
    assert has_bits(found[places < 0], y[places < 0])
    for place, own in enumerate(case[2]):
        for target, rank in zip(layer.targets, own, strict=True):
            if rank == 0:
                rows = np.flatnonzero(places == place)
                assert has_bits(found[rows, target.columns], y[rows, target.columns])


def check_bits(case: Case, num_rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """A row has the same bits alone."""
    layer = layer_of(case, dtype, device)
    places, x, y = draw(case, num_rows, dtype, device)
    together = add(layer, x, y, places)
    for row in range(0, len(x), 7):
        alone = slice(row, row + 1)
        assert has_bits(add(layer, x[alone], y[alone], places[alone])[0], together[row]), row


def has_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
