"""Attention over the paged KV cache in Triton, with kernels for prompts (or chunks) and decoding.

This is the host side: how the work is split into programs, and the launch parameters. The kernels
are in `nanoserve.kernels.triton.paged_attention_kernels` for rows of several tokens, and in
`nanoserve.kernels.triton.decode_attention_kernels` for rows of one or few.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.decode_attention_kernels import (
    decode_attention_kernel,
    merge_parts_kernel,
)
from nanoserve.kernels.triton.dependent_launch import has_dependent_launch
from nanoserve.kernels.triton.in_order_attention_kernels import (
    in_order_attention_kernel,
    merge_shares_kernel,
)
from nanoserve.kernels.triton.paged_attention_kernels import chunk_attention_kernel
from nanoserve.kernels.triton.quantized_kv import check_cache, has_e4m3, has_warp_products
from nanoserve.kernels.triton.split_work import check_arrivals, most_arrivals, num_multiprocessors
from nanoserve.kernels.triton.tile_config import (
    SHARED_MEMORY_WITHOUT_GPU,
    TileConfig,
    for_few_tokens,
    for_two_results,
    tile_config,
)

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_LOG2_E = math.log2(math.e)
_MULTIPROCESSORS_WITHOUT_GPU = 8  # under the interpreter: enough for tests to have partial results
_SHARE_KEYS = 512  # of a share of `in_order=True`; not tuned by measurements
_MOST_SHARED = 64  # rows of a tile (tokens x heads) if keys are split into shares


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    scale: float,
    num_decode_rows: int,
    max_context_len: int,
    num_shares: int | None = None,
    max_query_len: int | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    row_counts: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    in_order: bool = False,
) -> torch.Tensor:
    """Compute attention of every query token over the keys of its sequence up to itself.

    q             [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
    kv_cache      [2, num_blocks, num_kv_heads, block_size, head_dim], of q's dtype, or codes: int8,
                  or uint8 for e4m3
    kv_scales     of codes, float32 [2, num_blocks, num_kv_heads, block_size]; both are contiguous
    cu_seqlens_q  int32 [num_rows + 1]: row r has the tokens cu_seqlens_q[r : r + 2]
    context_lens  int32 [num_rows]; a row's tokens are the last ones of its context
    block_tables  int32 [num_rows, max_blocks]; columns beyond the context are never read, nor are
                  those before all windows of the row, or their blocks, which may contain NaN

    The last dimension of q and kv_cache must be contiguous; all other strides are free. The first
    `num_decode_rows` rows have one token each; their keys are split into `num_shares`, or as many
    as keep the GPU busy. The keys of the other rows are split, too, in the same launch, if
    `max_query_len` is given and small; without it, a row is read by as many programs as there are
    KV heads. A query sees `sliding_window` tokens, its own included, or all; c = `soft_cap` changes
    its scaled scores to c tanh(score / c). `sinks`, float32 [num_heads], is a score of each head
    that is in the sum of exponentials and has no value. Returns [num_tokens, num_heads, head_dim],
    contiguous, in q's dtype.

    in_order: use the kernels of `nanoserve.kernels.triton.in_order_attention_kernels` for all rows:
    a token's result then depends neither on other tokens, nor on whether it is in a decode row.

    `context_lens`, `cu_seqlens_q` and `row_counts` must be older than the kernel launched before
    this one, and than all kernels with dependent launch before it: from Hopper on they are read
    while these still run.

    `arrivals`: int32 zeros [`most_arrivals`] on the device, which no other stream uses: partial
    results are merged in the same launch, which leaves zeros. Without it, by a second launch.

    The host reads no tensor's values, and every program finds its share of the work on the GPU:
    captured in a CUDA graph, a launch stays valid as contexts grow. With `row_counts`, int32 [2] on
    the device, it stays valid for every mix of rows: these are the numbers of rows and of decode
    rows, in place of the tensors' lengths and of `num_decode_rows`. Each other row has two tokens
    or more. Entries beyond these may be anything, and are not computed.
    """
    check_cache(kv_cache, kv_scales, q.dtype)
    batch = _Batch(
        *(q, kv_cache, cu_seqlens_q, context_lens, block_tables),
        *(scale, sliding_window, soft_cap, (None, None) if kv_scales is None else tuple(kv_scales)),
        arrivals,
        sinks,
    )
    _check(batch)
    if arrivals is not None:
        least = most_arrivals(q.device)
        check_arrivals(arrivals, max(least, (num_shares or 0) * kv_cache.shape[2]))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if in_order:
        if row_counts is not None:
            raise ValueError("in_order=True supports no row_counts: pass the numbers of rows")
        _attend_in_order(batch, out, max_context_len)
        return out
    if row_counts is not None:
        _attend_mixed(batch, out, max_context_len, num_shares, row_counts)
        return out
    num_others = len(context_lens) - num_decode_rows
    if num_others > 0 and max_query_len is not None:
        num_queries = triton.next_power_of_2(max_query_len)
        block_m = num_queries * _group_padded(batch)
        if block_m <= _MOST_SHARED:  # all rows at once, decode rows included
            config = for_few_tokens(_config(batch, True), block_m)
            _decode(batch, config, out, max_context_len, num_shares, num_queries)
            return out
    if num_decode_rows > 0:
        rows = batch.rows(num_decode_rows)
        _decode(rows, _config(batch, True), out, max_context_len, num_shares, 1)
    if num_others > 0:
        _attend_chunks(batch, _config(batch, False), out, num_decode_rows, num_others)
    return out


def _attend_mixed(
    batch: "_Batch",
    out: torch.Tensor,
    max_context_len: int,
    num_shares: int | None,
    row_counts: torch.Tensor,
) -> None:
    """Launch both kernels for all rows: each finds its own rows on the GPU."""
    if row_counts.dtype != torch.int32 or row_counts.shape != (2,) or row_counts.stride(0) != 1:
        raise ValueError(
            f"row_counts must be contiguous int32 [2], rows and decode rows, not "
            f"{row_counts.dtype} {list(row_counts.shape)}"
        )
    _decode(batch, _config(batch, True), out, max_context_len, num_shares, 1, row_counts)
    num_chunks = min(len(batch.context_lens), len(batch.q) // 2)  # each has at least two tokens
    _attend_chunks(batch, _config(batch, False), out, 0, num_chunks, row_counts)


class _Batch(NamedTuple):
    q: torch.Tensor
    kv_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    scales: tuple[torch.Tensor | None, ...]  # scales of codes: K's and V's
    arrivals: torch.Tensor | None
    sinks: torch.Tensor | None

    @property
    def group(self) -> int:
        """Number of query heads that read a KV head."""
        return self.q.shape[1] // self.kv_cache.shape[2]

    def rows(self, count: int) -> "_Batch":
        """Return the first `count` rows; tensors with another start would recompile kernels."""
        return self._replace(
            cu_seqlens_q=self.cu_seqlens_q[: count + 1],
            context_lens=self.context_lens[:count],
            block_tables=self.block_tables[:count],
        )


def _check(batch: _Batch) -> None:
    q, kv_cache, *indices = batch[:5]
    if q.dim() != 3 or kv_cache.dim() != 5 or kv_cache.shape[0] != 2:
        raise ValueError(f"q {list(q.shape)} must be 3-D, kv_cache {list(kv_cache.shape)} [2, ...]")
    if q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} heads must be a multiple of {kv_cache.shape[2]} KV heads")
    if kv_cache.shape[4] != q.shape[2]:
        raise ValueError(
            f"q and kv_cache must have the same head_dim, not {q.shape[2]} and {kv_cache.shape[4]}"
        )
    if q.stride(-1) != 1 or kv_cache.stride(-1) != 1:
        raise ValueError(f"last strides must be 1: q {q.stride()}, kv_cache {kv_cache.stride()}")
    if q.dtype not in _TRITON_DTYPES:
        raise ValueError(f"q must be float32, float16 or bfloat16, not {q.dtype}")
    if not batch.scale > 0:  # the kernels take the maximum of unscaled scores
        raise ValueError(f"scale={batch.scale} must be positive")
    if batch.sliding_window is not None and batch.sliding_window < 1:
        raise ValueError(f"sliding_window={batch.sliding_window} must be at least 1")
    if batch.soft_cap is not None and not batch.soft_cap > 0:
        raise ValueError(f"soft_cap={batch.soft_cap} must be positive")
    if batch.sinks is not None:
        shape, dtype = [*batch.sinks.shape], batch.sinks.dtype
        if shape != [q.shape[1]] or dtype != torch.float32 or not batch.sinks.is_contiguous():
            raise ValueError(
                f"sinks must be contiguous float32 [{q.shape[1]}], one for each head, not {dtype} "
                f"{shape}"
            )
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


def _num_multiprocessors(device: torch.device) -> int:
    return num_multiprocessors(device, _MULTIPROCESSORS_WITHOUT_GPU)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return SHARED_MEMORY_WITHOUT_GPU
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks this one
    return properties.shared_memory_per_block_optin


def _config(batch: _Batch, is_decode: bool) -> TileConfig:
    q, has_codes = batch.q, batch.scales[0] is not None
    shared_memory = _shared_memory(q.device)
    return tile_config(q.shape[2], q.dtype, batch.group, is_decode, shared_memory, has_codes)


def _group_padded(batch: _Batch) -> int:
    return 1 << (batch.group - 1).bit_length()


def _num_shares(batch: _Batch, config: TileConfig, max_context_len: int, num_queries: int) -> int:
    """Return the number of shares: as many as keep the GPU busy, or as have work."""
    num_kv_heads, window = batch.kv_cache.shape[2], batch.sliding_window
    num_keys = min(max_context_len, (window or max_context_len) + num_queries - 1)
    most = len(batch.context_lens) * (num_keys // config.tile_n + 2)
    at_once = config.num_programs * _num_multiprocessors(batch.q.device) // num_kv_heads
    return max(1, min(at_once, most))


def _decode(
    batch: _Batch,
    config: TileConfig,
    out: torch.Tensor,
    max_context_len: int,
    num_shares: int | None,
    num_queries: int,
    row_counts: torch.Tensor | None = None,
) -> None:
    """Launch decode attention for all rows, of one token each, or of up to `num_queries`.

    `row_counts`: limits the rows to those that it counts.
    """
    q, kv_cache, cu_seqlens_q, context_lens, block_tables = batch[:5]
    scale, sliding_window, soft_cap, scales, arrivals, sinks = batch[5:]
    (_, num_heads, head_dim), num_rows = q.shape, len(context_lens)
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    if num_shares is None:
        num_shares = _num_shares(batch, config, max_context_len, num_queries)
    shape_of_parts = (num_shares, 2, num_queries, num_heads)
    parts = torch.empty(*shape_of_parts, head_dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(shape_of_parts, dtype=torch.float32, device=q.device)
    is_dependent = has_dependent_launch()
    launch = {"launch_pdl": True} if is_dependent else {}
    rows = (None if num_queries == 1 else cu_seqlens_q, context_lens)
    shape = {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": _padded_head_dim(head_dim),
        "QUERIES": num_queries,
        "TILE_N": config.tile_n,
        "IS_DEPENDENT": is_dependent,
    }
    decode_attention_kernel[(num_kv_heads, num_shares)](
        out,
        parts,
        lse,
        arrivals,
        q,
        *kv_cache,
        *scales,
        sinks,
        *rows,
        block_tables,
        num_rows,
        row_counts,
        scale * _LOG2_E,
        sliding_window,
        None if soft_cap is None else soft_cap * _LOG2_E,
        *q.stride()[:2],
        *kv_cache.stride()[1:4],
        block_tables.stride(0),
        GROUP=batch.group,
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        **_dot(batch, config),
        **shape,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch,
    )
    if num_shares > 1 and arrivals is None:
        merge_parts_kernel[(num_queries * num_heads, num_shares - 1)](
            out,
            parts,
            lse,
            *rows,
            num_rows,
            row_counts,
            num_shares,
            sliding_window,
            **shape,
            num_warps=2,
            **launch,
        )


def _attend_chunks(
    batch: _Batch,
    config: TileConfig,
    out: torch.Tensor,
    first_row: int,
    num_rows: int,
    row_counts: torch.Tensor | None = None,
) -> None:
    """Launch chunk attention for rows [first_row, first_row + num_rows), after the decode rows.

    `row_counts`: replaces these numbers on the device, where there may be fewer rows.
    """
    q, kv_cache, cu_seqlens_q, context_lens, block_tables = batch[:5]
    scale, sliding_window, soft_cap, scales, _, sinks = batch[5:]
    num_tokens, _, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group_padded = _group_padded(batch)
    # The number of tiles of a row follows from cu_seqlens_q, which the host does not read. Row r
    # starts at tile (tokens before it) // block_q + r, which always leaves enough room.
    num_tiles = num_rows + (num_tokens - first_row) // (config.block_m // group_padded)
    chunk_attention_kernel[(num_tiles * num_kv_heads,)](
        out,
        q,
        *kv_cache,
        *scales,
        sinks,
        cu_seqlens_q,
        context_lens,
        block_tables,
        first_row,
        num_rows,
        row_counts,
        num_kv_heads,
        scale * _LOG2_E,
        sliding_window,
        None if soft_cap is None else soft_cap * _LOG2_E,
        *q.stride()[:2],
        *kv_cache.stride()[1:4],
        block_tables.stride(0),
        GROUP=batch.group,
        GROUP_PADDED=group_padded,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=_padded_head_dim(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        TILE_N=config.tile_n,
        **_dot(batch, config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _attend_in_order(batch: _Batch, out: torch.Tensor, max_context_len: int) -> None:
    """Launch attention that does not depend on the batch.

    Each share has a program of its own if there are fewer tiles than multiprocessors.
    """
    q, kv_cache, cu_seqlens_q, context_lens, block_tables = batch[:5]
    scale, sliding_window, soft_cap, scales, _, sinks = batch[5:]
    (num_tokens, num_heads, head_dim), num_rows = q.shape, len(context_lens)
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group_padded, config = _group_padded(batch), for_two_results(_config(batch, False), batch.group)
    num_tiles = num_rows + num_tokens // (config.block_m // group_padded)
    share_tiles = max(1, _SHARE_KEYS // config.tile_n)
    num_programs, parts, sums = num_tiles * num_kv_heads, None, None
    num_shares = triton.cdiv(max_context_len, share_tiles * config.tile_n)
    if num_shares > 1 and num_programs < _num_multiprocessors(q.device):
        of_shares = num_shares, num_tokens, num_heads
        parts = torch.empty(*of_shares, head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(2, *of_shares, dtype=torch.float32, device=q.device)
    shape = {
        "GROUP": batch.group,
        "GROUP_PADDED": group_padded,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": _padded_head_dim(head_dim),
        "BLOCK_M": config.block_m,
        "TILE_N": config.tile_n,
        "SHARE_TILES": share_tiles,
        "num_warps": config.num_warps,
    }
    in_order_attention_kernel[(num_programs, 1 if parts is None else num_shares)](
        out,
        parts,
        sums,
        q,
        *kv_cache,
        *scales,
        sinks,
        cu_seqlens_q,
        context_lens,
        block_tables,
        num_rows,
        num_tokens,
        num_kv_heads,
        scale * _LOG2_E,
        sliding_window,
        None if soft_cap is None else soft_cap * _LOG2_E,
        *q.stride()[:2],
        *kv_cache.stride()[1:4],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        **_dot(batch, config),
        **shape,
        num_stages=config.num_stages,
    )
    if parts is not None:
        merge_shares_kernel[(num_programs,)](
            out,
            parts,
            sums,
            sinks,
            cu_seqlens_q,
            context_lens,
            num_rows,
            num_tokens,
            num_shares,
            num_kv_heads,
            sliding_window,
            **shape,
        )


def _padded_head_dim(head_dim: int) -> int:
    """Return head_dim padded for tensor cores: a power of two, 16 or more."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _dot(batch: _Batch, config: TileConfig) -> dict[str, object]:
    """Return the kernels' constants for products; the interpreter computes bfloat16 incorrectly."""
    dtype, has_codes = batch.q.dtype, batch.scales[0] is not None
    dot_dtype = _TRITON_DTYPES[dtype]
    if triton.knobs.runtime.interpret:
        dot_dtype = tl.float32
    elif has_codes and dtype == torch.bfloat16:
        dot_dtype = tl.float16  # codes are converted to it in fewer instructions, and exactly
    return {
        "DOT_DTYPE": dot_dtype,
        "DOT_PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "HAS_E4M3": has_codes and has_e4m3(),
        "V_IN_ROWS": has_codes and has_warp_products(config.block_m),
    }
