"""Attention's products with codes of int8, checked in float64: also on other processors."""

import numpy as np
from numba import njit

from nanoserve.kernels.cpu.attention_tiles import add_values, scores_of

_OF_A_MODEL = np.uint16(0)  # bfloat16


@njit
def _address(rows):
    return rows.ctypes.data, rows.strides[0]


def _calling(inner):
    """`scores_of` or `add_values`, for one or two queries."""

    @njit
    def call(heads, of_tokens, cache, scales):
        given = cache.ctypes.data, scales.ctypes.data, len(cache), cache.shape[1], cache.ctypes.data
        elements = _OF_A_MODEL, cache[0, 0]
        if len(heads) == 2:
            inner(2, elements, _address(heads), _address(of_tokens), given)
        else:
            inner(1, elements, _address(heads), _address(of_tokens), given)

    return call


_scores, _values = _calling(scores_of), _calling(add_values)


def random_codes(num_tokens: int, head_dim: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """int8 [num_tokens, head_dim] and their scales, of very different sizes."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-127, 128, (num_tokens, head_dim), dtype=np.int8)
    return codes, np.exp(rng.normal(size=num_tokens)).astype(np.float32)


def scores(queries: np.ndarray, k: np.ndarray, scales: np.ndarray) -> np.ndarray:
    found = np.full((len(queries), len(k)), np.nan, dtype=np.float32)
    _scores(queries, found, k, scales)
    return found


def add_to(sums: np.ndarray, weights: np.ndarray, v: np.ndarray, scales: np.ndarray) -> np.ndarray:
    found = sums.copy()
    _values(found, weights, v, scales)
    return found


def assert_scores(num_queries: int, num_tokens: int, head_dim: int) -> None:
    k, scales = random_codes(num_tokens, head_dim)
    rng = np.random.default_rng(1)
    queries = rng.integers(-32767, 32768, (num_queries, head_dim), dtype=np.int16)
    exact = queries.astype(np.float64) @ k.astype(np.float64).T * scales
    most = np.abs(queries.astype(np.float64)) @ np.abs(k.astype(np.float64)).T * scales
    assert (np.abs(scores(queries, k, scales) - exact) <= 1e-6 * most).all()


def assert_values(num_queries: int, num_tokens: int, head_dim: int) -> None:
    """Weights are off by half of a 32767th of the largest of their sixteen, if at all."""
    v, scales = random_codes(num_tokens, head_dim)
    rng = np.random.default_rng(1)
    # Sixteens are a thousand times apart: in that of a large weight, small ones may be lost.
    sizes = np.exp(-7 * (np.arange(num_tokens) // 16)) * rng.random((num_queries, num_tokens))
    weights, sums = sizes.astype(np.float32), rng.random((num_queries, head_dim), np.float32)
    own = weights.astype(np.float64) * scales
    exact = sums + own @ v.astype(np.float64)
    most = sums + own @ np.abs(v.astype(np.float64))
    largest = np.zeros_like(own)
    for start in range(0, num_tokens, 16):
        largest[:, start : start + 16] = own[:, start : start + 16].max(axis=1, keepdims=True)
    bound = 1e-6 * most + 0.51 / 32767 * largest @ np.abs(v.astype(np.float64))
    found = add_to(sums, weights, v, scales)
    assert (np.abs(found - exact) <= bound).all()
