"""Attention in which V is the first numbers of K, and all query heads share one KV head.

This is multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434). A key has
576 numbers in published models, of which the first 512, the latent, are also the value. So a loaded
key is used twice, as an operand of the scores and as one of the weighted sum, and is loaded in two
parts, each of which is a power of two: 512 + 64 numbers, where one part would be padded to 1024.

A program computes a tile of queries over a share of the keys that they see. The rows of its tile
are some heads of some tokens of one sequence:

    tile row m:  query token m // HEADS,  head m % HEADS of the program's block of heads

The keys of every tile are split into the same number of shares, as equal as tiles of keys allow;
`merge_latent_shares_kernel` merges them by their sums of exponentials, in their order. The programs
find their work on the GPU, from the lengths, so a launch in a CUDA graph stays valid as contexts
grow. Decode rows and chunks run the same code.
"""

import triton
import triton.language as tl

from nanoserve.kernels.triton.paged_attention_kernels import find_row, first_tile
from nanoserve.kernels.triton.quantized_kv import as_operand, unscaled


# Values that change from step to step are not specialised: values of 1 or divisible by 16 would
# each recompile the kernel.
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_stride"])
def latent_attention_kernel(
    out_ptr,  # [num_tokens, num_heads, value_dim]
    # None (compiled away) if there is one share. Otherwise acc of each share, float32 [num_shares,
    # num_tokens, num_heads, value_dim], and its row_max and row_sum, float32 [2, num_shares,
    # num_tokens, num_heads].
    parts_ptr,
    sums_ptr,
    q_ptr,
    k_ptr,
    k_scales_ptr,  # None (compiled away), or scales of codes: float32, one for each KV slot
    cu_seqlens_q_ptr,
    context_lens_ptr,
    block_tables_ptr,
    num_rows,
    row_counts_ptr,  # int32 [2], of which the first replaces num_rows; None: compiled away
    num_tokens,
    scale,  # times log2(e)
    q_token_stride,
    q_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,  # of the numbers behind the value
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    # 1) The tile, and its share of the keys.
    if row_counts_ptr is not None:
        num_rows = tl.load(row_counts_ptr)
    row, first_token, num_queries, first_position = _queries_of_tile(
        cu_seqlens_q_ptr, context_lens_ptr, tl.program_id(0), num_rows, BLOCK_M // HEADS
    )
    if num_queries <= 0:
        return
    num_keys = first_position + num_queries
    per_share, _ = _shares(num_keys, tl.num_programs(2), TILE_N)
    begin = tl.program_id(2) * per_share
    end = tl.minimum(begin + per_share, tl.cdiv(num_keys, TILE_N))
    if begin >= end:
        return

    # 2) Its queries, in two parts.
    token, head, exists = _tile_rows(num_queries, NUM_HEADS, HEADS, BLOCK_M)
    d, rest = tl.arange(0, VALUE_DIM_PADDED), VALUE_DIM + tl.arange(0, REST_PADDED)
    q_ptr += first_token * q_token_stride  # int64: it may exceed 2^31 in a large batch
    q_rows = (token * q_token_stride + head * q_head_stride)[:, None]
    mask = exists[:, None] & (d < VALUE_DIM)[None, :]
    q = tl.load(q_ptr + q_rows + d[None, :], mask=mask, other=0.0).to(DOT_DTYPE)
    rest_mask = exists[:, None] & (rest < HEAD_DIM)[None, :]
    q_rest = tl.load(q_ptr + q_rows + rest[None, :], mask=rest_mask, other=0.0).to(DOT_DTYPE)
    position = tl.minimum(first_position + token, num_keys - 1)  # padding rows also see a key
    block_table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride

    # 3) Attention over its keys, with the online softmax. Maxima are finite, so that a query which
    #    sees none of them has weights exp2(-inf) = 0, not NaN.
    acc = tl.zeros([BLOCK_M, VALUE_DIM_PADDED], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -3e38, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for n_tile in range(begin, end):
        key = n_tile * TILE_N + tl.arange(0, TILE_N)
        # Other table columns and KV slots may contain anything, even NaN.
        is_seen = key < num_keys
        block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=is_seen, other=0)
        slot = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * slot_stride
        k_rows, seen = k_ptr + slot[:, None], is_seen[:, None]
        k = tl.load(k_rows + d[None, :], mask=seen & (d < VALUE_DIM)[None, :], other=0.0)
        k_rest = tl.load(k_rows + rest[None, :], mask=seen & (rest < HEAD_DIM)[None, :], other=0.0)
        if k_scales_ptr is not None:
            # Codes are contiguous, so dividing by HEAD_DIM gives the index of the scale.
            k_scale = tl.load(k_scales_ptr + slot // HEAD_DIM, mask=is_seen, other=0.0)[:, None]
            k = (unscaled(k) * k_scale).to(DOT_DTYPE)
            k_rest = (unscaled(k_rest) * k_scale).to(DOT_DTYPE)
        else:
            k = as_operand(k, DOT_DTYPE, False, False)
            k_rest = as_operand(k_rest, DOT_DTYPE, False, False)
        scores = tl.dot(q, tl.trans(k), input_precision=DOT_PRECISION)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=DOT_PRECISION)
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores * scale - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(k.dtype), k, acc * rescale[:, None], input_precision=DOT_PRECISION)
        row_max = new_max

    # 4) The result, or the share's part of it.
    places = (first_token + token) * NUM_HEADS + head
    if parts_ptr is None:
        out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places[:, None] * VALUE_DIM + d[None, :], out, mask=mask)
    else:
        size = num_tokens.to(tl.int64) * NUM_HEADS  # of a share
        places += tl.program_id(2) * size
        tl.store(parts_ptr + places[:, None] * VALUE_DIM + d[None, :], acc, mask=mask)
        tl.store(sums_ptr + places, row_max, mask=exists)
        tl.store(sums_ptr + tl.num_programs(2) * size + places, row_sum, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_shares"])
def merge_latent_shares_kernel(
    out_ptr,  # [num_tokens, num_heads, value_dim]
    parts_ptr,
    sums_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    num_rows,
    row_counts_ptr,
    num_tokens,
    num_shares,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_DIM_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Merge the shares of a tile of queries, in their order; the grid has no shares."""
    if row_counts_ptr is not None:
        num_rows = tl.load(row_counts_ptr)
    _, first_token, num_queries, first_position = _queries_of_tile(
        cu_seqlens_q_ptr, context_lens_ptr, tl.program_id(0), num_rows, BLOCK_M // HEADS
    )
    if num_queries <= 0:
        return
    _, num_used = _shares(first_position + num_queries, num_shares, TILE_N)
    token, head, exists = _tile_rows(num_queries, NUM_HEADS, HEADS, BLOCK_M)
    d = tl.arange(0, VALUE_DIM_PADDED)
    mask = exists[:, None] & (d < VALUE_DIM)[None, :]
    places = (first_token + token) * NUM_HEADS + head
    size = num_tokens.to(tl.int64) * NUM_HEADS
    acc = tl.zeros([BLOCK_M, VALUE_DIM_PADDED], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -3e38, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for share in range(num_used):
        part = share * size + places
        own_acc = tl.load(parts_ptr + part[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0)
        own_max = tl.load(sums_ptr + part, mask=exists, other=-3e38)
        own_sum = tl.load(sums_ptr + num_shares * size + part, mask=exists, other=1.0)
        new_max = tl.maximum(row_max, own_max)
        rescale, weight = tl.exp2(row_max - new_max), tl.exp2(own_max - new_max)
        acc = acc * rescale[:, None] + own_acc * weight[:, None]
        row_sum = row_sum * rescale + own_sum * weight
        row_max = new_max
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places[:, None] * VALUE_DIM + d[None, :], out, mask=mask)


@triton.jit
def _shares(num_keys, num_shares, TILE_N: tl.constexpr):
    """Return the number of key tiles of a share, and the number of shares that have any."""
    num_tiles = tl.cdiv(num_keys, TILE_N)
    per_share = tl.cdiv(num_tiles, num_shares)
    return per_share, tl.cdiv(num_tiles, per_share)


@triton.jit
def _queries_of_tile(cu_seqlens_q_ptr, context_lens_ptr, tile, num_rows, BLOCK_Q: tl.constexpr):
    """Return a tile's row, its first token (int64), number of queries, and first position.

    The number is 0 or less for a tile that its row does not need.
    """
    row = find_row(cu_seqlens_q_ptr, tile, 0, num_rows, BLOCK_Q)
    start, end = tl.load(cu_seqlens_q_ptr + row), tl.load(cu_seqlens_q_ptr + row + 1)
    num_tiles = tl.cdiv(end - start, BLOCK_Q)
    number = tile - first_tile(cu_seqlens_q_ptr, row, 0, BLOCK_Q)
    # Late queries see the most keys, so they start first.
    before = (num_tiles - 1 - number) * BLOCK_Q
    num_queries = tl.where(number >= num_tiles, 0, tl.minimum(end - start - before, BLOCK_Q))
    first_position = tl.load(context_lens_ptr + row) - (end - start) + before
    return row, (start + before).to(tl.int64), num_queries, first_position


@triton.jit
def _tile_rows(num_queries, NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the token (in the tile) and the head of each row of a tile, and whether it exists."""
    m = tl.arange(0, BLOCK_M)
    token, head = m // HEADS, tl.program_id(1) * HEADS + m % HEADS
    return token, head, (token < num_queries) & (head < NUM_HEADS)
