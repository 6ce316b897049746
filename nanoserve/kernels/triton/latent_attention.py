"""Paged attention whose V is the first numbers of K: the launcher of its Triton kernels.

The kernels are in `nanoserve.kernels.triton.latent_attention_kernels`.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.latent_attention_kernels import (
    latent_attention_kernel,
    merge_latent_shares_kernel,
)
from nanoserve.kernels.triton.quantized_kv import check_cache
from nanoserve.kernels.triton.split_work import PROGRAMS, num_multiprocessors

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_LOG2_E = math.log2(math.e)
_MULTIPROCESSORS_WITHOUT_GPU = 8  # under the interpreter: enough for tests to have several shares
_TILES_OF_SHARE = 2  # tiles of keys of a share at least: merging takes time, too


class _Tiles(NamedTuple):
    """Tile sizes and launch parameters; compiled for all GPUs, measured on none."""

    block_m: int  # rows of a query tile: tokens times heads
    tile_n: int  # keys at once
    num_warps: int
    num_stages: int


def latent_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
    max_context_len: int,
    num_shares: int | None = None,
    k_scales: torch.Tensor | None = None,
    row_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of every query token over the keys of its sequence up to itself.

    q             [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
    k_cache       [1, num_blocks, 1, block_size, head_dim], of q's dtype, or codes: int8, or uint8
                  for e4m3; V is its first `value_dim` numbers
    k_scales      of codes, float32 [1, num_blocks, 1, block_size]
    cu_seqlens_q  int32 [num_rows + 1]: row r has the tokens cu_seqlens_q[r : r + 2]
    context_lens  int32 [num_rows]; a row's tokens are the last ones of its context
    block_tables  int32 [num_rows, max_blocks]; columns beyond the context are never read

    The last dimension of q must be contiguous, and all of the cache. Keys are split into
    `num_shares` per tile of queries, or as many as keep the GPU busy. Returns [num_tokens,
    num_heads, value_dim], contiguous, in q's dtype.

    The host reads no tensor's values: in a CUDA graph, a launch stays valid as contexts grow up to
    `max_context_len`. With `row_counts`, int32 on the device, the first of them is the number of
    rows; entries beyond may be anything, and the results of their tokens, too.
    """
    _check(q, k_cache, value_dim, scale, (cu_seqlens_q, context_lens, block_tables))
    check_cache(k_cache, k_scales, q.dtype)
    (num_tokens, num_heads, head_dim), num_rows = q.shape, len(context_lens)
    heads = triton.next_power_of_2(num_heads)
    tiles = _tiles(q.dtype, heads, k_scales is not None)
    heads = min(heads, tiles.block_m)
    # A row of n tokens has at most n // (tokens of a tile) + 1 tiles.
    num_tiles = num_rows + num_tokens // (tiles.block_m // heads)
    num_blocks = triton.cdiv(num_heads, heads)
    if num_shares is None:
        at_once = PROGRAMS * num_multiprocessors(q.device, _MULTIPROCESSORS_WITHOUT_GPU)
        most = triton.cdiv(max_context_len, _TILES_OF_SHARE * tiles.tile_n)
        num_shares = max(1, min(at_once // (num_tiles * num_blocks), most))
    out = torch.empty(num_tokens, num_heads, value_dim, dtype=q.dtype, device=q.device)
    parts = sums = None
    if num_shares > 1:
        of_shares = num_shares, num_tokens, num_heads
        parts = torch.empty(*of_shares, value_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(2, *of_shares, dtype=torch.float32, device=q.device)
    shape: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "HEADS": heads,
        "VALUE_DIM": value_dim,
        "VALUE_DIM_PADDED": _padded(value_dim),
        "BLOCK_M": tiles.block_m,
        "TILE_N": tiles.tile_n,
        "num_warps": tiles.num_warps,
    }
    is_interpreted = triton.knobs.runtime.interpret  # it computes bfloat16 incorrectly
    latent_attention_kernel[(num_tiles, num_blocks, num_shares)](
        out,
        parts,
        sums,
        q,
        k_cache,
        k_scales,
        cu_seqlens_q,
        context_lens,
        block_tables,
        num_rows,
        row_counts,
        num_tokens,
        scale * _LOG2_E,
        *q.stride()[:2],
        k_cache.stride(1),
        k_cache.stride(3),
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        REST_PADDED=_padded(head_dim - value_dim),
        BLOCK_SIZE=k_cache.shape[3],
        DOT_DTYPE=tl.float32 if is_interpreted else _DTYPES[q.dtype],
        DOT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_stages=tiles.num_stages,
        **shape,
    )
    if parts is not None:
        merge_latent_shares_kernel[(num_tiles, num_blocks)](
            out,
            parts,
            sums,
            cu_seqlens_q,
            context_lens,
            num_rows,
            row_counts,
            num_tokens,
            num_shares,
            **shape,
        )
    return out


@functools.cache
def _tiles(dtype: torch.dtype, heads_padded: int, has_codes: bool) -> _Tiles:
    """Return tiles that fit into registers and 99 KiB of shared memory with 576 numbers a key."""
    if dtype == torch.float32:
        return _Tiles(16, tile_n=16, num_warps=8, num_stages=2)
    if heads_padded <= 16 or has_codes:  # codes become floats in registers
        return _Tiles(16, tile_n=32, num_warps=4, num_stages=2)
    return _Tiles(32, tile_n=32, num_warps=8, num_stages=2)


def _padded(size: int) -> int:
    """Return a size for tensor cores: a power of two, 16 or more."""
    return max(16, triton.next_power_of_2(size))


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    value_dim: int,
    scale: float,
    indices: tuple[torch.Tensor, ...],
) -> None:
    if q.dim() != 3 or k_cache.dim() != 5 or k_cache.shape[::2] != (1, 1, q.shape[2]):
        raise ValueError(
            f"q {list(q.shape)} must be [tokens, heads, head_dim], and the cache "
            f"{list(k_cache.shape)} [1, blocks, 1, slots, head_dim]"
        )
    if not 0 < value_dim <= q.shape[2]:
        raise ValueError(f"value_dim={value_dim} must be from 1 to head_dim={q.shape[2]}")
    if q.stride(-1) != 1 or not k_cache.is_contiguous():
        raise ValueError(
            f"q {q.stride()} must be contiguous in its last dimension, the cache {k_cache.stride()}"
            f" in all"
        )
    if q.dtype not in _DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, not {q.dtype}")
    if not scale > 0:  # the kernel takes the maximum of unscaled scores
        raise ValueError(f"scale={scale} must be positive")
    lengths = [len(tensor) for tensor in indices]
    if lengths != [lengths[1] + 1, lengths[1], lengths[1]]:
        raise ValueError(
            f"cu_seqlens_q, context_lens and block_tables have lengths {lengths}, but "
            f"they must be num_rows + 1, num_rows, num_rows"
        )
    for tensor in indices:
        if tensor.dtype != torch.int32 or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
            raise ValueError(
                f"indices must be int32 with last stride 1, not {tensor.dtype}, {tensor.stride()}"
            )
