"""A solution of `exercise.py`."""

from collections.abc import Callable

import numpy as np
from numpy import ndarray


def route(logits: ndarray, top_k: int, renormalise: bool) -> tuple[ndarray, ndarray]:
    """float32 [tokens, experts] -> integers and float32, both [tokens, top_k]."""
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exp / exp.sum(axis=1, keepdims=True)
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(probabilities, ids, axis=1)
    if renormalise:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return ids, weights


def group_by_expert(ids: ndarray, num_experts: int) -> tuple[ndarray, ndarray]:
    """Integers [tokens, top_k] -> order [tokens x top_k] and bounds [num_experts + 1]."""
    counts = np.bincount(ids.ravel(), minlength=num_experts)
    return np.argsort(ids.ravel(), kind="stable"), np.concatenate([[0], np.cumsum(counts)])


def sum_of_experts(
    hidden: ndarray,
    ids: ndarray,
    weights: ndarray,
    gate_up: ndarray,
    down: ndarray,
    multiply: Callable[[ndarray, ndarray], ndarray],
    num_experts: int,
    first_expert: int = 0,
) -> ndarray:
    """[tokens, hidden], [tokens, top_k] twice, [here, 2 x size, hidden], [here, hidden, size] ->
    [tokens, hidden]."""
    out = np.zeros_like(hidden)
    order, bounds = group_by_expert(ids, num_experts)
    for here in range(len(down)):
        expert = first_expert + here
        pairs = order[bounds[expert] : bounds[expert + 1]]
        if len(pairs):
            tokens = pairs // ids.shape[1]
            gate, up = np.split(multiply(hidden[tokens], gate_up[here]), 2, axis=1)
            product = multiply(gate / (1 + np.exp(-gate)) * up, down[here])
            out[tokens] += product * weights.ravel()[pairs, None]
    return out
