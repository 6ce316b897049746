"""Exercise: a paged KV cache in numpy.

`cache` is K (or V) of one layer: [num_blocks, num_kv_heads, block_size, head_dim]. Block 0 is the
dummy block and belongs to no sequence. A block table lists the physical blocks of a sequence in
order. KV slots are numbered block x block_size + offset.

Run the test with: pytest -x docs/04-paging/test_exercise.py
"""

import numpy as np


def grow(block_table: list[int], free: list[int], num_tokens: int, block_size: int) -> bool:
    """Extend `block_table`, in place, so that it holds `num_tokens` tokens.

    Take new blocks from the front of `free`. Return False if there are too few; then neither list
    may change. A table that is long enough stays as it is, also if it is longer than needed.
    """
    raise NotImplementedError


def slot_mapping(block_table: list[int], positions: np.ndarray, block_size: int) -> np.ndarray:
    """Return the KV slot of each position: integers [n] -> integers [n]."""
    raise NotImplementedError


def store(cache: np.ndarray, slots: np.ndarray, x: np.ndarray) -> None:
    """Write `x` [n, num_kv_heads, head_dim] to the KV slots `slots` [n] of `cache`, in place."""
    raise NotImplementedError


def gather(cache: np.ndarray, block_table: list[int], num_tokens: int) -> np.ndarray:
    """Return the first `num_tokens` tokens of a sequence: [num_kv_heads, num_tokens, head_dim].

    `num_tokens` is at least 1. The table may list more blocks than they need; do not read those.
    """
    raise NotImplementedError
