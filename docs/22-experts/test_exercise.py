"""The exercise of chapter 22 against a loop over tokens, and against the engine's experts."""

from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy import ndarray

from nanoserve.models.layers import experts as engine

from .exercise import group_by_expert, route, sum_of_experts


@dataclass
class Counted:
    """Compute x @ weight.T, and record how many rows x had each time."""

    rows: list[int] = field(default_factory=list)

    def __call__(self, x: ndarray, weight: ndarray) -> ndarray:
        self.rows.append(len(x))
        return x @ weight.T


@dataclass
class Case:
    """Random experts, and a batch with chosen experts for each token."""

    hidden: ndarray
    ids: ndarray
    weights: ndarray
    gate_up: ndarray
    down: ndarray

    @classmethod
    def random(cls, seed: int) -> "Case":
        rng = np.random.default_rng(seed)
        num_experts = int(rng.integers(2, 12))
        top_k, tokens = int(rng.integers(1, num_experts + 1)), int(rng.integers(1, 20))
        width, size = 6, 5

        def normal(*shape: int) -> ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        ids = np.array([rng.permutation(num_experts)[:top_k] for _ in range(tokens)])
        weights = rng.random((tokens, top_k)).astype(np.float32)
        gate_up, down = normal(num_experts, 2 * size, width), normal(num_experts, width, size)
        return cls(normal(tokens, width), ids, weights, gate_up, down)

    def __str__(self) -> str:
        return f"{len(self.down)} experts, ids {self.ids.tolist()}"

    def naive(self) -> ndarray:
        """The sum, one pair after the other."""
        out = np.zeros_like(self.hidden)
        for token, (ids, weights) in enumerate(zip(self.ids, self.weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                gate, up = np.split(self.gate_up[expert] @ self.hidden[token], 2)
                out[token] += weight * (self.down[expert] @ (gate / (1 + np.exp(-gate)) * up))
        return out

    def yours(self, multiply: Counted, first: int = 0, end: int | None = None) -> ndarray:
        return sum_of_experts(
            self.hidden,
            self.ids,
            self.weights,
            self.gate_up[first:end],
            self.down[first:end],
            multiply,
            len(self.down),
            first,
        )


def near(found: ndarray, expected: ndarray, case: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4, err_msg=str(case))


def test_the_softmax_is_over_all_experts() -> None:
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    ids, weights = route(logits, 2, renormalise=False)
    assert ids.tolist() == [[0, 1]], f"logits {logits}: experts {ids}"
    near(weights, [[0.6439, 0.2369]], f"logits {logits}, not renormalised")
    _, weights = route(logits, 2, renormalise=True)
    near(weights, [[0.7311, 0.2689]], f"logits {logits}, renormalised")


def test_of_equal_experts_the_lower_number_comes_first() -> None:
    logits = np.array([[0.0, 3.0, 3.0, 1.0], [1.0, 1.0, 1.0, 1.0]], np.float32)
    ids, _ = route(logits, 3, renormalise=True)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]], f"logits {logits}: experts {ids}"


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([[1000.0, 999.0, 0.0]], np.float32)
    _, weights = route(logits, 2, renormalise=False)
    near(weights, [[0.7311, 0.2689]], f"logits {logits}")


def test_pairs_are_sorted_by_expert_and_keep_their_order() -> None:
    ids = np.array([[0, 2], [2, 1], [0, 1], [2, 0]])
    order, bounds = group_by_expert(ids, 4)
    assert order.tolist() == [0, 4, 7, 3, 5, 1, 2, 6], f"ids {ids.tolist()}: order {order}"
    assert bounds.tolist() == [0, 3, 5, 8, 8], f"ids {ids.tolist()}: bounds {bounds}"


def test_each_expert_multiplies_once_with_all_of_its_tokens() -> None:
    case = Case.random(0)
    case.ids, case.weights = np.array([[0, 2], [2, 1], [0, 1], [2, 0]]), np.ones((4, 2), np.float32)
    case.hidden = np.eye(4, 6, dtype=np.float32)
    multiply = Counted()
    near(case.yours(multiply), case.naive(), case)
    assert sorted(multiply.rows) == [2, 2, 3, 3, 3, 3], f"{case}: rows {multiply.rows}"


@pytest.mark.parametrize("seed", range(40))
def test_routing_is_the_engines(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, experts = int(rng.integers(1, 9)), int(rng.integers(1, 20))
    top_k, renormalise = int(rng.integers(1, experts + 1)), bool(seed % 2)
    logits = rng.standard_normal((tokens, experts)).astype(np.float32) * 3
    layer = SimpleNamespace(
        router_logits=lambda hidden: hidden,
        top_k=top_k,
        norm_topk_prob=renormalise,
        rounds_weights=False,
    )
    expected_ids, expected = engine.SparseMoE.route(layer, torch.from_numpy(logits))
    ids, weights = route(logits, top_k, renormalise)
    case = f"seed {seed}: top {top_k}, renormalise={renormalise}, logits {logits.tolist()}"
    assert ids.tolist() == expected_ids.tolist(), case
    near(weights, expected.numpy(), case)


@pytest.mark.parametrize("seed", range(40))
def test_the_sum_is_that_of_a_loop_over_tokens_and_the_engines(seed: int) -> None:
    case, multiply = Case.random(seed), Counted()
    found = case.yours(multiply)
    near(found, case.naive(), f"seed {seed}: {case}")
    tensors = (case.hidden, case.ids, case.weights, case.gate_up, case.down)
    near(found, engine.sum_of_experts(*map(torch.from_numpy, tensors)).numpy(), f"seed {seed}")
    counts = np.bincount(case.ids.ravel())
    expected = sorted([*counts[counts > 0]] * 2)
    assert sorted(multiply.rows) == expected, f"seed {seed}: {case}: products of {multiply.rows}"


@pytest.mark.parametrize("seed", range(40))
def test_ranks_add_up(seed: int) -> None:
    """Two to four ranks, each with a contiguous part of the experts; one may have none."""
    case = Case.random(seed)
    num_experts, ranks = len(case.down), 2 + seed % 3
    borders = [rank * num_experts // ranks for rank in range(ranks + 1)]
    total, rows = np.zeros_like(case.hidden), []
    for first, end in pairwise(borders):
        multiply = Counted()
        total += case.yours(multiply, first, end)
        rows += multiply.rows
    near(total, case.naive(), f"seed {seed}: {case}, borders {borders}")
    assert sum(rows) == 2 * case.ids.size, f"seed {seed}: {case}, borders {borders}: rows {rows}"
