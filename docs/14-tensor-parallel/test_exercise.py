"""Test of the exercise of chapter 14: the shards fit together, and the ring sends few values."""

import numpy as np
import pytest

from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.linear import ColumnParallelLinear
from nanoserve.models.layers.tensor_parallel import TensorParallel

from .exercise import ring_all_reduce, rows_of

HIDDEN = 8


class CountingRing:
    """Carries copies, like a network link, and counts."""

    def __init__(self, size: int) -> None:
        self.calls, self.sent = 0, [0] * size

    def send_right(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        assert len(pieces) == len(self.sent), "every rank sends one array at a time"
        self.calls += 1
        for rank, piece in enumerate(pieces):
            self.sent[rank] += piece.size
        copies = [np.array(piece) for piece in pieces]
        return copies[-1:] + copies[:-1]


def by_the_layer(
    outputs: dict[str, int], num_slices: dict[str, int], rank: int, size: int
) -> dict[str, range]:
    context = LayerContext(parallel=ParallelContext(TensorParallel(rank, size)))
    layer = ColumnParallelLinear(HIDDEN, outputs, context, num_slices=num_slices)
    return {
        tensor.name.removesuffix(".weight"): range(
            tensor.start, tensor.start + len(tensor.destination)
        )
        for tensor in layer.checkpoint_tensors("qkv_proj")
    }


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_rows_are_those_of_the_engines_layer(size: int, num_kv_heads: int) -> None:
    outputs = {"q_proj": 8 * 6, "k_proj": num_kv_heads * 6, "v_proj": num_kv_heads * 6}
    kv_slices = min(size, num_kv_heads)
    num_slices = {"q_proj": size, "k_proj": kv_slices, "v_proj": kv_slices}
    for rank in range(size):
        expected = by_the_layer(outputs, num_slices, rank, size)
        case = f"rows_of({outputs}, {num_slices}, {rank}, {size})"
        assert rows_of(outputs, num_slices, rank, size) == expected, case


def test_all_ranks_together_have_every_row() -> None:
    outputs, num_slices = {"gate_proj": 20, "up_proj": 12}, {"gate_proj": 4, "up_proj": 2}
    parts = [rows_of(outputs, num_slices, rank, 4) for rank in range(4)]
    case = f"rows_of({outputs}, {num_slices}, rank, 4) for ranks 0 to 3: {parts}"
    assert [row for part in parts for row in part["gate_proj"]] == [*range(20)], case
    assert parts[0]["up_proj"] == parts[1]["up_proj"] == range(6), case
    assert parts[2]["up_proj"] == parts[3]["up_proj"] == range(6, 12), case


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("pieces", [1, 5])
def test_every_rank_has_the_sum_and_none_sent_too_much(size: int, pieces: int) -> None:
    rng, length = np.random.default_rng(size), size * pieces
    vectors = [rng.integers(-9, 9, length) for _ in range(size)]
    before, ring = [vector.copy() for vector in vectors], CountingRing(size)
    results = ring_all_reduce(vectors, ring)
    case = f"ring_all_reduce({[vector.tolist() for vector in before]}, ring)"
    assert len(results) == size, case
    for result in results:
        np.testing.assert_array_equal(result, sum(before), err_msg=case)
    assert ring.calls <= 2 * (size - 1), case
    assert max(ring.sent) <= 2 * (size - 1) * pieces, case
    for vector, original in zip(vectors, before, strict=True):
        np.testing.assert_array_equal(vector, original, err_msg=f"{case} modified a vector")


def test_results_are_not_the_same_memory() -> None:
    results = ring_all_reduce([np.array([1, 2]), np.array([3, 4])], CountingRing(2))
    results[0][:] = 0
    assert results[1].tolist() == [4, 6], "of [1, 2] and [3, 4]; rank 0's result was overwritten"
