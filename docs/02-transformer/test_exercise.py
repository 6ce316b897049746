"""Test of the exercise of chapter 2, against our rotary layer and torch's attention."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.models.layers import ops
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rotary import RotaryEmbedding

from .exercise import attention, rotate


def test_rotation_is_that_of_our_layer() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=1e6), 32, 500, LayerContext())
    positions = np.array([0, 1, 499, 7, 7])
    x = np.random.default_rng(0).standard_normal((5, 3, 32))
    cos, sin = (table[torch.from_numpy(positions)] for table in (rotary.cos, rotary.sin))
    expected = ops.rotate(torch.from_numpy(x), cos, sin).numpy()
    case = f"rotate(x, {positions}, 1e6), x of {x.shape} as np.random.default_rng(0) draws it"
    np.testing.assert_allclose(rotate(x, positions, 1e6), expected, atol=1e-3, err_msg=case)


def test_rotation_keeps_lengths_and_distances() -> None:
    x = np.random.default_rng(1).standard_normal((2, 4, 16))
    near = rotate(x, np.array([3, 10]), 1e4)
    far = rotate(x, np.array([1003, 1010]), 1e4)
    score, far_score = (near[0] * near[1]).sum(-1), (far[0] * far[1]).sum(-1)
    case = "rotate(x, positions, 1e4), positions [3, 10] and [1003, 1010], x of seed 1: "
    np.testing.assert_allclose(score, far_score, atol=1e-9, err_msg=f"{case}scores")
    lengths, before = (near**2).sum(-1), (x**2).sum(-1)
    np.testing.assert_allclose(lengths, before, atol=1e-9, err_msg=f"{case}lengths")
    assert not np.allclose(score, (x[0] * x[1]).sum(-1)), f"{case}nothing has been rotated"


def batch(lens: list[int], heads: int, kv_heads: int, size: float = 1.0) -> tuple[np.ndarray, ...]:
    """Return q, k, v and cu_seqlens, the same ones for the same arguments."""
    n, rng = sum(lens), np.random.default_rng(0)
    q = rng.standard_normal((n, heads, 8)) * size
    k, v = rng.standard_normal((2, n, kv_heads, 8))
    return q, k, v, np.cumsum([0, *lens])


@pytest.mark.parametrize("size", [1.0, 1000.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("lens", [[1], [7], [1, 1, 1], [3, 1, 5], [4, 0, 2], [0]])
def test_attention_is_torchs_for_each_sequence(
    lens: list[int], heads: int, kv_heads: int, size: float
) -> None:
    q, k, v, cu_seqlens = batch(lens, heads, kv_heads, size)
    found = attention(q, k, v, cu_seqlens)
    case = f"attention(*batch({lens}, {heads}, {kv_heads}, {size}))"
    assert found.shape == q.shape, case
    for i, length in enumerate(lens):
        if length == 0:
            continue
        tokens = slice(cu_seqlens[i], cu_seqlens[i + 1])
        one = (torch.from_numpy(x[tokens]).transpose(0, 1)[None] for x in (q, k, v))
        expected = F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        right, where = expected[0].transpose(0, 1), f"{case}, sequence {i}"
        np.testing.assert_allclose(found[tokens], right, atol=1e-6, err_msg=where)


def test_neither_neighbours_nor_the_future_leak_in() -> None:
    q, k, v, cu_seqlens = batch([3, 5, 2], heads=4, kv_heads=2)
    before = attention(q, k, v, cu_seqlens)
    k[6:], v[6:] = 100.0, -100.0  # the second sequence's last two tokens, and its neighbour
    after = attention(q, k, v, cu_seqlens)
    case = "attention(*batch([3, 5, 2], 4, 2)), with other k and v from token 6 on"
    np.testing.assert_array_equal(before[:6], after[:6], err_msg=case)
    assert not np.allclose(before[6:], after[6:]), case
