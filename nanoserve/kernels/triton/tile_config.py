"""Tile sizes and launch parameters of paged attention."""

import functools
from typing import NamedTuple

import torch
import triton

SHARED_MEMORY_WITHOUT_GPU = 227 * 1024  # of an H100
_TWO_DECODES = 142 * 1024  # of two programs with head_dim 128
_WIDE_PREFILL = 161 * 1024  # of the largest tiles with head_dim 256, on Hopper and Blackwell
# Shared memory of GPUs whose tensor cores read operands from it, which leaves more registers.
_FROM_SHARED_MEMORY = 227 * 1024
_ROWS_OF_MANY_KEYS = 16  # rows of a query tile, over codes: with more, 128 keys spill registers


class TileConfig(NamedTuple):
    """Tile sizes and launch parameters of a kernel."""

    block_m: int  # rows of a query tile: tokens times heads of a group
    tile_n: int  # keys at once
    num_warps: int
    num_stages: int  # pipeline stages: with 5, block tables are read four tiles ahead, K and V two
    num_programs: int = 1  # for decoding, per multiprocessor: as measured on an H100


@functools.cache  # called in every layer for few shapes: `next_power_of_2` alone takes microseconds
def tile_config(
    head_dim: int,
    dtype: torch.dtype,
    group: int,
    is_decode: bool,
    shared_memory: int = SHARED_MEMORY_WITHOUT_GPU,
    has_codes: bool = False,
) -> TileConfig:
    """Return the largest tiles that fit into registers and shared memory, as ptxas reports them.

    `shared_memory`: the bytes that one program may use. A100 and H100 have 163 and 227 KiB, but the
    smaller GPUs of their generations, an RTX 4090 or an L4, 99. `has_codes`: the KV cache is 8-bit
    and is converted to floats in registers, of which fewer are left for tiles.
    """
    wide, full_precision = head_dim > 128, dtype == torch.float32
    # Tensor cores do not support full float32: its operands go through registers, in small tiles.
    if is_decode:  # limited by memory bandwidth: the bytes in flight matter
        if full_precision:
            config = TileConfig(16, 16, num_warps=4, num_stages=5, num_programs=2)
        elif wide:
            config = TileConfig(16, 32, num_warps=4, num_stages=5, num_programs=1)
        else:
            num_programs = 2 if shared_memory > _TWO_DECODES else 1
            config = TileConfig(16, 64, num_warps=4, num_stages=5, num_programs=num_programs)
    elif full_precision:
        tile_n = 16 if wide else 32
        num_warps = 16 if head_dim > 64 else 8
        config = TileConfig(block_m=32, tile_n=tile_n, num_warps=num_warps, num_stages=5)
    elif wide and shared_memory < _WIDE_PREFILL:  # 68 KiB instead of 136
        config = TileConfig(block_m=64, tile_n=32, num_warps=8, num_stages=4)
    else:  # limited by tensor cores: large tiles reuse every K and V often
        config = TileConfig(block_m=128, tile_n=32 if wide else 64, num_warps=8, num_stages=5)
    if has_codes:
        config = _for_codes(config, head_dim, full_precision, group, is_decode, shared_memory)
    return config._replace(block_m=max(config.block_m, triton.next_power_of_2(group)))


def for_few_tokens(config: TileConfig, block_m: int) -> TileConfig:
    """Return the decode configuration for `block_m` tokens x heads; not tuned by measurements."""
    if block_m > _ROWS_OF_MANY_KEYS:
        config = config._replace(tile_n=min(config.tile_n, 64))
    if block_m > 32:
        config = config._replace(num_warps=8, num_programs=1)
    return config._replace(block_m=max(config.block_m, block_m))


def for_two_results(config: TileConfig, group: int) -> TileConfig:
    """Return the configuration of chunks for a kernel with two results of a tile in registers."""
    block_m = max(min(config.block_m, 64), triton.next_power_of_2(group))
    return config._replace(block_m=block_m, num_stages=min(config.num_stages, 3))


def _for_codes(
    config: TileConfig,
    head_dim: int,
    full_precision: bool,
    group: int,
    is_decode: bool,
    shared_memory: int,
) -> TileConfig:
    """Return the configuration over codes: the fastest where measured, else one that fits.

    On an H100, head_dim 128, 2026-11-28, relative to bfloat16's time: decoding 64 rows or more 0.59
    to 0.67 (with 64 keys 0.71 to 0.75), but 0.86 to 0.93 (0.81 to 0.85) if there are 8,000 keys in
    all; prompts 1.44 to 1.45 (with 3 stages 1.52 to 1.54).
    """
    if full_precision:
        config = config._replace(num_warps=8)
        return config if is_decode else config._replace(block_m=16, tile_n=16)
    if shared_memory < _FROM_SHARED_MEMORY:
        return config if is_decode else config._replace(tile_n=32)
    is_measured = 64 < head_dim <= 128  # all are padded to 128
    if is_decode:
        has_room = is_measured and group <= _ROWS_OF_MANY_KEYS
        return config._replace(tile_n=128) if has_room else config
    return config if is_measured else config._replace(num_stages=3)
