"""Attention of `batch_invariant=True`: a query's result depends on nothing but its own keys.

The kernels for decode rows and for chunks split the keys of a row, and select tiles without masks,
by what else is in the batch. Here a row's keys are always split in the same way, into shares of a
fixed number of tiles, counted from its first position, and are always read by the same code:

    a query's result = ((share 0 merged with share 1) merged with share 2) ... merged with its sink

A tile of queries is computed by one program, which keeps the merged shares in registers, or by a
program for each share, whose partial results `merge_shares_kernel` merges in the same order with
the same instructions. The launcher chooses by what keeps the GPU busy; the bits are the same.

Tiles and shares that a query does not see, but that others of its tile do, change nothing: their
weights are 0, and its maximum stays.
"""

import triton
import triton.language as tl

from nanoserve.kernels.triton.paged_attention_kernels import (
    find_row,
    first_tile,
    load_sinks,
    online_softmax_step,
    tiles_seen,
)
from nanoserve.kernels.triton.quantized_kv import as_operand, load_scales


# Values that change from step to step are not specialised: values of 1 or divisible by 16 would
# each recompile the kernel.
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_stride"])
def in_order_attention_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    # None: a program computes all shares. Otherwise acc of each share, float32 [num_shares,
    # num_tokens, num_heads, head_dim], and its row_max and row_sum, float32 [2, num_shares,
    # num_tokens, num_heads].
    parts_ptr,
    sums_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    # None (their code is compiled away), or scales of codes: float32, one by KV slot and head.
    k_scales_ptr,
    v_scales_ptr,
    sinks_ptr,  # float32 [num_heads], or None: compiled away
    cu_seqlens_q_ptr,
    context_lens_ptr,
    block_tables_ptr,
    num_rows,
    num_tokens,
    num_kv_heads,
    scale,  # times log2(e)
    sliding_window,  # None: its code is compiled away
    soft_cap,  # times log2(e), or None
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SHARE_TILES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    V_IN_ROWS: tl.constexpr,
):
    """Compute a tile of queries of one KV head: all shares of its keys, or a single one."""
    # 1) The tile, and its keys.
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PADDED
    kv_head = tl.program_id(0) % num_kv_heads
    row, first_token, num_queries, first_position = _queries_of_tile(
        cu_seqlens_q_ptr, context_lens_ptr, tl.program_id(0) // num_kv_heads, num_rows, BLOCK_Q
    )
    if num_queries <= 0:
        return
    num_keys = first_position + num_queries
    first, last = tiles_seen(first_position, num_keys, sliding_window, TILE_N)
    first_share, end_share = first // SHARE_TILES, tl.cdiv(last, SHARE_TILES)
    if parts_ptr is not None:
        if (tl.program_id(1) < first_share) | (tl.program_id(1) >= end_share):
            return
        first_share = tl.program_id(1)
        end_share = first_share + 1

    # 2) Its queries.
    d = tl.arange(0, HEAD_DIM_PADDED)
    token, head, exists = _tile_rows(num_queries, kv_head, GROUP, GROUP_PADDED, BLOCK_M)
    mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    q_ptr += first_token * q_token_stride  # int64: it may exceed 2^31 in a large batch
    q_offsets = (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(DOT_DTYPE)
    position = tl.minimum(first_position + token, num_keys - 1)  # padding rows also see a key
    k_ptr += kv_head.to(tl.int64) * kv_head_stride
    v_ptr += kv_head.to(tl.int64) * kv_head_stride
    if k_scales_ptr is not None:
        k_scales_ptr += kv_head.to(tl.int64) * (kv_head_stride // HEAD_DIM)
        v_scales_ptr += kv_head.to(tl.int64) * (kv_head_stride // HEAD_DIM)
    block_table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride

    # 3) Attention over each share, and the merged result so far.
    acc, row_max, row_sum = _nothing(BLOCK_M, HEAD_DIM_PADDED)
    for share in range(first_share, end_share):
        own_acc, own_max, own_sum = _nothing(BLOCK_M, HEAD_DIM_PADDED)
        begin = tl.maximum(first, share * SHARE_TILES)
        for n_tile in range(begin, tl.minimum(last, (share + 1) * SHARE_TILES)):
            key = n_tile * TILE_N + tl.arange(0, TILE_N)
            # Other table columns and KV slots may contain anything, even NaN.
            is_seen = key < num_keys
            if sliding_window is not None:
                is_seen &= key > first_position - sliding_window
            kv_mask = is_seen[:, None] & (d < HEAD_DIM)[None, :]
            block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=is_seen, other=0)
            slot = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * slot_stride
            kv_offsets = slot[:, None] + d[None, :]
            k = tl.load(k_ptr + kv_offsets, mask=kv_mask, other=0.0)
            k = as_operand(k, DOT_DTYPE, HAS_E4M3, False)
            v = tl.load(v_ptr + kv_offsets, mask=kv_mask, other=0.0)
            v = as_operand(v, DOT_DTYPE, HAS_E4M3, V_IN_ROWS)
            k_scales, log_v_scales = None, None
            if k_scales_ptr is not None:
                k_scales = load_scales(k_scales_ptr, slot, is_seen, HEAD_DIM, False)
                log_v_scales = load_scales(v_scales_ptr, slot, is_seen, HEAD_DIM, True)
            visible = key[None, :] <= position[:, None]
            if sliding_window is not None:
                visible &= key[None, :] > position[:, None] - sliding_window
            own_acc, own_max, own_sum = online_softmax_step(
                q,
                k,
                v,
                k_scales,
                log_v_scales,
                visible,
                own_acc,
                own_max,
                own_sum,
                scale,
                soft_cap,
                DOT_PRECISION,
            )
        acc, row_max, row_sum = _merged(acc, row_max, row_sum, own_acc, own_max, own_sum)

    # 4) The result.
    num_heads = num_kv_heads * GROUP
    places = (first_token + token) * num_heads + head
    if parts_ptr is None:
        if sinks_ptr is not None:
            acc, row_max, row_sum = _with_sinks(acc, row_max, row_sum, sinks_ptr, head, exists)
        out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)
    else:
        size = num_tokens.to(tl.int64) * num_heads  # of a share
        places += first_share * size
        tl.store(parts_ptr + places[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
        tl.store(sums_ptr + places, row_max, mask=exists)
        tl.store(sums_ptr + tl.num_programs(1) * size + places, row_sum, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_shares"])
def merge_shares_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    parts_ptr,
    sums_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    num_rows,
    num_tokens,
    num_shares,
    num_kv_heads,
    sliding_window,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SHARE_TILES: tl.constexpr,
):
    """Merge the shares of a tile of queries of one KV head, in their order."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PADDED
    kv_head = tl.program_id(0) % num_kv_heads
    _, first_token, num_queries, first_position = _queries_of_tile(
        cu_seqlens_q_ptr, context_lens_ptr, tl.program_id(0) // num_kv_heads, num_rows, BLOCK_Q
    )
    if num_queries <= 0:
        return
    first, last = tiles_seen(first_position, first_position + num_queries, sliding_window, TILE_N)
    d = tl.arange(0, HEAD_DIM_PADDED)
    token, head, exists = _tile_rows(num_queries, kv_head, GROUP, GROUP_PADDED, BLOCK_M)
    mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    num_heads = num_kv_heads * GROUP
    places = (first_token + token) * num_heads + head
    size = num_tokens.to(tl.int64) * num_heads
    acc, row_max, row_sum = _nothing(BLOCK_M, HEAD_DIM_PADDED)
    for share in range(first // SHARE_TILES, tl.cdiv(last, SHARE_TILES)):
        part = share * size + places
        own_acc = tl.load(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        own_max = tl.load(sums_ptr + part, mask=exists, other=-3e38)
        own_sum = tl.load(sums_ptr + num_shares * size + part, mask=exists, other=1.0)
        acc, row_max, row_sum = _merged(acc, row_max, row_sum, own_acc, own_max, own_sum)
    if sinks_ptr is not None:
        acc, row_max, row_sum = _with_sinks(acc, row_max, row_sum, sinks_ptr, head, exists)
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[:, None] * HEAD_DIM + d[None, :], out, mask=mask)


@triton.jit
def _queries_of_tile(cu_seqlens_q_ptr, context_lens_ptr, tile, num_rows, BLOCK_Q: tl.constexpr):
    """Return a tile's row, its first token (int64), number of queries, and first position.

    The number is 0 or less for a tile that its row does not need.
    """
    row = find_row(cu_seqlens_q_ptr, tile, 0, num_rows, BLOCK_Q)
    start, end = tl.load(cu_seqlens_q_ptr + row), tl.load(cu_seqlens_q_ptr + row + 1)
    # Late queries see the most keys, so they start first.
    num_tiles = tl.cdiv(end - start, BLOCK_Q)
    q_tile = num_tiles - 1 - (tile - first_tile(cu_seqlens_q_ptr, row, 0, BLOCK_Q))
    before = q_tile * BLOCK_Q
    num_queries = tl.where(q_tile < 0, 0, tl.minimum(end - start - before, BLOCK_Q))
    first_position = tl.load(context_lens_ptr + row) - (end - start) + before
    return row, (start + before).to(tl.int64), num_queries, first_position


@triton.jit
def _tile_rows(
    num_queries, kv_head, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the token (in the tile) and the head of each row of a tile, and whether it exists."""
    m = tl.arange(0, BLOCK_M)
    token, head = m // GROUP_PADDED, m % GROUP_PADDED
    return token, kv_head * GROUP + head, (token < num_queries) & (head < GROUP)


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Return the (acc, row_max, row_sum) of no keys.

    Maxima are finite, so that the difference of two is not NaN.
    """
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -3e38, dtype=tl.float32)
    return acc, row_max, tl.zeros([BLOCK_M], dtype=tl.float32)


@triton.jit
def _merged(acc, row_max, row_sum, own_acc, own_max, own_sum):
    """Return two partial results, merged into one.

    `tl.fma` determines which products are rounded; otherwise the compiler could choose differently
    in each kernel.
    """
    new_max = tl.maximum(row_max, own_max)
    rescale, weight = tl.exp2(row_max - new_max), tl.exp2(own_max - new_max)
    acc = tl.fma(acc, rescale[:, None], own_acc * weight[:, None])
    return acc, new_max, tl.fma(row_sum, rescale, own_sum * weight)


@triton.jit
def _with_sinks(acc, row_max, row_sum, sinks_ptr, head, exists):
    """Merge the shares with the sinks of their heads, which have a score and no value."""
    sinks = load_sinks(sinks_ptr, head, exists)
    nothing = tl.zeros(acc.shape, dtype=tl.float32)
    return _merged(acc, row_max, row_sum, nothing, sinks, tl.full(sinks.shape, 1.0, tl.float32))
