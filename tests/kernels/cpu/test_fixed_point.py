"""Attention of a 16-bit model with K and V in int8: its products are those of integers."""

import numpy as np
import pytest

pytest.importorskip("numba")

from fixed_point import add_to, assert_scores, assert_values, random_codes, scores

HEAD_DIMS = [8, 32, 40, 64, 96, 128, 160, 256]


@pytest.mark.small(head_dim=[40, 96, 128], num_tokens=[7, 37])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_tokens", [1, 7, 16, 37, 64])
@pytest.mark.parametrize("num_queries", [1, 2])
def test_sums_are_those_of_numbers(num_queries: int, num_tokens: int, head_dim: int) -> None:
    assert_scores(num_queries, num_tokens, head_dim)
    assert_values(num_queries, num_tokens, head_dim)


def test_the_largest_numbers_do_not_overflow() -> None:
    k, scales = np.full((16, 1024), -128, np.int8), np.ones(16, np.float32)
    found = scores(np.full((2, 1024), 32767, np.int16), k, scales)
    assert (found == np.float32(-128 * 32767 * 1024)).all()
    sums, weights = np.zeros((2, 1024), np.float32), np.ones((2, 16), np.float32)
    np.testing.assert_allclose(add_to(sums, weights, k, scales), -128 * 16, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("is_scale", [False, True])
def test_what_is_no_number_comes_out_in_its_query(value: float, is_scale: bool) -> None:
    v, scales = random_codes(32, 64)
    weights, sums = np.ones((2, 32), np.float32), np.zeros((2, 64), np.float32)
    (scales if is_scale else weights[1])[3] = value
    found = add_to(sums, weights, v, scales)
    assert not np.isfinite(found[1]).any()
    assert np.isfinite(found[0]).all() is np.bool_(not is_scale)


def test_weights_of_nothing_add_nothing() -> None:
    v, scales = random_codes(32, 64)
    sums, weights = np.ones((1, 64), np.float32), np.zeros((1, 32), np.float32)
    weights[0, 20] = 1e-35
    np.testing.assert_array_equal(add_to(sums, weights, v, scales), sums)
