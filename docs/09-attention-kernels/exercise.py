"""Exercise: attention in one pass over the keys, and the merge of parts.

Complete both functions; numpy is enough.

`attend` is one program of a decode kernel: one query, one head, some tiles of keys. It sees a tile
only by calling `read_tile(i)`, for every tile at most once, and may keep nothing of a tile but a
few numbers and one vector of head_dim. So there is no second pass in which one knows the largest
score: when a larger one comes, rescale what you have.

Things that real kernels meet:

- Scores may be large: exp(1000) is infinite. Never take the exponential of a positive number.
- Not every key of a tile is visible: the last tile reaches beyond the context, the first one before
  the sliding window. K and V of invisible keys may hold anything, even NaN, and 0 * NaN is NaN.
- A tile may have no visible key at all, and so may all tiles of a program.

`merge` puts together what several programs have found on different tiles of one row. A program that
saw no key at all hands in -inf as its log-sum-exp, and its output then holds anything, even NaN.
At least one program saw a key.

    pytest -x docs/09-attention-kernels/test_exercise.py
"""

from collections.abc import Callable

import numpy as np

# k and v [tile_n, head_dim], and bool [tile_n]: which keys the query may see.
Tile = tuple[np.ndarray, np.ndarray, np.ndarray]


def attend(
    q: np.ndarray, read_tile: Callable[[int], Tile], num_tiles: int, scale: float
) -> tuple[np.ndarray, float]:
    """(out, lse) of the query q [head_dim] over the visible keys of all tiles.

    out [head_dim] is the sum of softmax(scale * k @ q) * v, and lse the natural logarithm of the
    sum of exp(scale * k @ q). Without any visible key: anything, and -inf.
    """
    raise NotImplementedError


def merge(outs: np.ndarray, lses: np.ndarray) -> np.ndarray:
    """outs [num_parts, head_dim] and lses [num_parts] of one row -> its output [head_dim]."""
    raise NotImplementedError
