"""Exercise: attention in one pass over the keys, and the merge of parts.

Complete both functions; numpy is enough.

`attend` is one program of a decode kernel: one query, one head, some tiles of keys. It reads a tile
only by calling `read_tile(i)`, for every tile at most once, and may keep nothing of a tile except a
few numbers and one vector of head_dim. So there is no second pass in which the largest score is
known: when a larger one comes, rescale the state.

As in real kernels:

- Scores may be large: exp(1000) is infinite. Never take the exponential of a positive number.
- Not every key of a tile is visible: the last tile reaches beyond the context, the first one before
  the sliding window. K and V of invisible keys may have any value, even NaN, and 0 * NaN is NaN.
- A tile may have no visible key at all, and so may all tiles of a program.

`merge` combines the results of several programs for different tiles of one row. A program without
any visible key returns -inf as its log-sum-exp, and its output may have any value, even NaN. At
least one program has a visible key.

    pytest -x docs/09-attention-kernels/test_exercise.py
"""

from collections.abc import Callable

import numpy as np

# k and v [tile_n, head_dim], and bool [tile_n]: which keys the query may see.
Tile = tuple[np.ndarray, np.ndarray, np.ndarray]


def attend(
    q: np.ndarray, read_tile: Callable[[int], Tile], num_tiles: int, scale: float
) -> tuple[np.ndarray, float]:
    """Return (out, lse) of the query q [head_dim] over the visible keys of all tiles.

    out [head_dim] is the sum of softmax(scale * k @ q) * v, and lse the natural logarithm of the
    sum of exp(scale * k @ q). Without any visible key, out may have any value, and lse is -inf.
    """
    raise NotImplementedError


def merge(outs: np.ndarray, lses: np.ndarray) -> np.ndarray:
    """Return a row's output [head_dim] from outs [num_parts, head_dim] and lses [num_parts]."""
    raise NotImplementedError
