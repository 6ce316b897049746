"""A solution of `exercise.py`."""

import numpy as np


def grow(block_table: list[int], free: list[int], num_tokens: int, block_size: int) -> bool:
    """Count first, then take: all or nothing."""
    num_new = -(-num_tokens // block_size) - len(block_table)
    if num_new > len(free):
        return False
    for _ in range(num_new):
        block_table.append(free.pop(0))
    return True


def slot_mapping(block_table: list[int], positions: np.ndarray, block_size: int) -> np.ndarray:
    blocks = np.array(block_table)[positions // block_size]
    return blocks * block_size + positions % block_size


def store(cache: np.ndarray, slots: np.ndarray, x: np.ndarray) -> None:
    """Store; with two index arrays around a slice, numpy puts their dimension first."""
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = x


def gather(cache: np.ndarray, block_table: list[int], num_tokens: int) -> np.ndarray:
    """Map [blocks, heads, block_size, dim] to [heads, blocks x block_size, dim], cut to length."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    blocks = cache[block_table[: -(-num_tokens // block_size)]]
    tokens = blocks.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
    return tokens[:, :num_tokens]
