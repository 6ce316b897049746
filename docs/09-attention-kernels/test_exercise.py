"""Tests for the exercise of chapter 9, against a softmax over all keys."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from .exercise import Tile, attend, merge

TILE_N = 4


@pytest.fixture(autouse=True)
def no_overflow_and_no_nan() -> Iterator[None]:
    with np.errstate(over="raise", invalid="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Tiles:
    """Returns each tile once. Invisible keys and values are NaN."""

    def __init__(self, k: np.ndarray, v: np.ndarray, is_seen: np.ndarray) -> None:
        missing = -len(k) % TILE_N
        is_seen = np.pad(is_seen, (0, missing))
        self.k, self.v = (np.pad(x, ((0, missing), (0, 0))) for x in (k, v))
        self.k[~is_seen] = self.v[~is_seen] = np.nan
        self.is_seen, self.were_read = is_seen, set()

    def __len__(self) -> int:
        return len(self.k) // TILE_N

    def read(self, i: int) -> Tile:
        assert 0 <= i < len(self), f"tile {i} does not exist"
        assert i not in self.were_read, f"tile {i} is read twice"
        self.were_read.add(i)
        span = slice(i * TILE_N, (i + 1) * TILE_N)
        return self.k[span].copy(), self.v[span].copy(), self.is_seen[span].copy()


def inputs(
    num_keys: int, seed: int, size: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=8) * size, *rng.normal(size=(2, num_keys, 8))
    return q, k, v


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> tuple[np.ndarray, float]:
    scores = k @ q * scale
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum(), float(scores.max() + np.log(weights.sum()))


@pytest.mark.parametrize("num_keys", [1, 3, 4, 5, 8, 23])
@pytest.mark.parametrize("size", [1.0, 1e4], ids=["small", "large"])
def test_one_pass_is_the_softmax_over_all_keys(num_keys: int, size: float) -> None:
    q, k, v = inputs(num_keys, seed=num_keys, size=size)
    tiles = Tiles(k, v, np.ones(num_keys, dtype=bool))
    out, lse = attend(q, tiles.read, len(tiles), 0.25)
    right, right_lse = expected(q, k, v, 0.25)
    case = f"inputs({num_keys}, seed={num_keys}, size={size}), all keys visible, scale 0.25"
    np.testing.assert_allclose(out, right, rtol=1e-9, err_msg=case)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-9, err_msg=case)


@pytest.mark.parametrize("window", [1, 3, 4, 6, 9, 11])
def test_keys_before_the_window_are_not_seen(window: int) -> None:
    """With a window of 6 or less, whole tiles have no visible key."""
    q, k, v = inputs(11, seed=window)
    tiles = Tiles(k, v, np.arange(11) >= 11 - window)
    out, lse = attend(q, tiles.read, len(tiles), 0.5)
    right, right_lse = expected(q, k[-window:], v[-window:], 0.5)
    case = f"inputs(11, seed={window}), the last {window} keys visible, scale 0.5"
    np.testing.assert_allclose(out, right, rtol=1e-9, err_msg=case)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-9, err_msg=case)


def test_without_a_visible_key_the_log_sum_exp_is_minus_infinity() -> None:
    q, k, v = inputs(8, seed=0)
    tiles = Tiles(k, v, np.zeros(8, dtype=bool))
    _, lse = attend(q, tiles.read, len(tiles), 0.5)
    assert lse == -np.inf, "inputs(8, seed=0), no key visible, scale 0.5"


@pytest.mark.parametrize("seed", range(20))
def test_parts_merge_to_the_whole(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    num_keys = int(rng.integers(1, 60))
    q, k, v = inputs(num_keys, seed, size=float(rng.choice([1.0, 1e4])))
    cuts = np.sort(rng.integers(0, num_keys + 1, size=rng.integers(0, 6)))
    outs, lses = [], []
    for ks, vs in zip(np.split(k, cuts), np.split(v, cuts), strict=True):
        tiles = Tiles(ks, vs, np.ones(len(ks), dtype=bool))
        out, lse = attend(q, tiles.read, len(tiles), 0.25)
        outs.append(out if len(ks) else np.full(8, np.nan))
        lses.append(lse)
    right, _ = expected(q, k, v, 0.25)
    case = f"merge(np.array({np.array(outs).tolist()}), np.array({np.array(lses).tolist()}))"
    found = merge(np.array(outs), np.array(lses))
    np.testing.assert_allclose(found, right, rtol=1e-8, err_msg=case)
