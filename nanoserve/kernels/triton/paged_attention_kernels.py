"""Attention of rows with several tokens: a program computes some queries over all keys they see.

The K and V of a sequence are stored in blocks that its block table lists (Kwon et al. 2023,
"Efficient memory management for large language model serving with PagedAttention"). With block size
16 and the block table [5, 2, 8, 12], position 35 is offset 3 of the sequence's block 2, which is
block 8 of the cache: KV slot 8 * 16 + 3 = 131. The kernel looks up every position like this, so the
number of keys of a tile is independent of the block size.

A program computes one tile of queries of one KV head. All query heads that read this KV head are
rows of the tile (grouped-query attention), so every K and V is loaded once for all of them:

    tile row m:  query token m // GROUP_PADDED,  head m % GROUP_PADDED of the group

It iterates over the keys with the online softmax (Dao et al. 2022, "FlashAttention"): `row_max` and
`row_sum` are the maximum and the sum of exponentials of the scores so far, and the accumulator is
rescaled whenever the maximum grows. Exponentials are to base 2, which is what the hardware
computes; the factor log2(e) is folded into the scale.

With a sliding window (Beltagy et al. 2020, "Longformer") a query sees its last `sliding_window`
tokens and nothing before them. The iteration then begins at the first tile that a query of the
program sees. With a soft cap c (Gemma Team 2024, "Gemma 2"), scores become c tanh(score / c). A
sink (OpenAI 2025, "gpt-oss") is a learned score of a head that is in the sum of exponentials only,
so that a query need not attend to any key.

Rows with a single token, whose time is spent on reading keys and not on arithmetic, are split
differently: see `nanoserve.kernels.triton.decode_attention_kernels`.
"""

import triton
import triton.language as tl

from nanoserve.kernels.triton.quantized_kv import as_operand, load_scales


# Values that change from step to step are not specialised: values of 1 or divisible by 16 would
# each recompile the kernel.
@triton.jit(do_not_specialize=["first_row", "num_rows", "table_stride"])
def chunk_attention_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
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
    first_row,
    num_rows,
    # int32 [2], in place of both: numbers of rows and of decode rows; None: compiled away.
    row_counts_ptr,
    num_kv_heads,
    scale,  # times log2(e)
    # If None, their code is compiled away. Otherwise they are values, not constants: they only set
    # ranges, masks and a factor, and layers with different values share a kernel.
    sliding_window,
    soft_cap,  # times log2(e)
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
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    V_IN_ROWS: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PADDED
    kv_head = tl.program_id(0) % num_kv_heads
    tile = tl.program_id(0) // num_kv_heads
    if row_counts_ptr is not None:
        first_row = tl.load(row_counts_ptr + 1)
        num_rows = tl.load(row_counts_ptr) - first_row
        # The grid is sized for other steps, too: a tile without a row ends here.
        if tile >= first_tile(cu_seqlens_q_ptr, first_row + num_rows, first_row, BLOCK_Q):
            return
    row = find_row(cu_seqlens_q_ptr, tile, first_row, num_rows, BLOCK_Q)
    q_tile = tile - first_tile(cu_seqlens_q_ptr, row, first_row, BLOCK_Q)
    q_start = tl.load(cu_seqlens_q_ptr + row)
    q_len = tl.load(cu_seqlens_q_ptr + row + 1) - q_start
    num_q_tiles = tl.cdiv(q_len, BLOCK_Q)
    if q_tile >= num_q_tiles:
        return  # a tile that the row does not need
    q_tile = num_q_tiles - 1 - q_tile  # late queries see the most keys, so they start first
    context_len = tl.load(context_lens_ptr + row)
    first_position = context_len - q_len + q_tile * BLOCK_Q

    num_keys = tl.minimum(context_len, first_position + BLOCK_Q)
    first, last = tiles_seen(first_position, num_keys, sliding_window, TILE_N)
    # Masks are needed only in the first and the last few tiles of keys: the unmasked tiles between
    # them begin where the last query's window does, and end at the first query.
    plain_first = first
    plain_last = tl.minimum(tl.maximum(first, (first_position + 1) // TILE_N), last)
    if sliding_window is not None:
        plain_first = tl.maximum(first, tl.cdiv(num_keys - sliding_window, TILE_N))
        plain_first = tl.minimum(plain_first, plain_last)
    num_plain = plain_last - plain_first

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM_PADDED)
    token, head = m // GROUP_PADDED, m % GROUP_PADDED  # relative to the first of the tile
    exists = (token < q_len - q_tile * BLOCK_Q) & (head < GROUP)
    mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    # int64: token * stride may exceed 2^31 in a large batch, and block * stride in a large cache.
    first_token, first_head = (q_start + q_tile * BLOCK_Q).to(tl.int64), kv_head * GROUP
    q_ptr += first_token * q_token_stride + first_head * q_head_stride
    q_offsets = (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(DOT_DTYPE)

    position = first_position + token
    if sliding_window is not None:  # so that padding rows also see a key
        position = tl.minimum(position, num_keys - 1)
    k_ptr += kv_head.to(tl.int64) * kv_head_stride
    v_ptr += kv_head.to(tl.int64) * kv_head_stride
    if k_scales_ptr is not None:
        k_scales_ptr += kv_head.to(tl.int64) * (kv_head_stride // HEAD_DIM)
        v_scales_ptr += kv_head.to(tl.int64) * (kv_head_stride // HEAD_DIM)
    block_table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
    # The window of a later query may begin after the first tile: all its scores there are -inf.
    # With a finite maximum their weight is exp2(-inf) = 0; with -inf it would be NaN. At the end
    # every row has seen a key: its own.
    row_max = tl.full([BLOCK_M], -3e38, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for MASKED in tl.static_range(2):  # the body is compiled twice, without masks and with masks
        begin = first + num_plain if MASKED else plain_first
        end = last if MASKED else plain_last
        for i in range(begin, end):
            n_tile = i
            if MASKED and sliding_window is not None:  # first the tiles before the unmasked ones
                n_tile = tl.where(i < plain_last, i - num_plain, i)
            key = n_tile * TILE_N + tl.arange(0, TILE_N)
            # A constant true mask costs nothing: the compiler removes it.
            is_seen = tl.full([TILE_N], True, tl.int1)
            if MASKED:  # other table columns and KV slots may contain anything, even NaN
                is_seen = key < context_len
                if sliding_window is not None:
                    is_seen &= key > first_position - sliding_window
            kv_mask = is_seen[:, None] & tl.full([TILE_N, HEAD_DIM_PADDED], True, tl.int1)
            if HEAD_DIM < HEAD_DIM_PADDED:
                kv_mask &= (d < HEAD_DIM)[None, :]
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

            visible = None
            if MASKED:
                visible = key[None, :] <= position[:, None]
                if sliding_window is not None:
                    visible &= key[None, :] > position[:, None] - sliding_window
            acc, row_max, row_sum = online_softmax_step(
                q,
                k,
                v,
                k_scales,
                log_v_scales,
                visible,
                acc,
                row_max,
                row_sum,
                scale,
                soft_cap,
                DOT_PRECISION,
            )

    num_heads = num_kv_heads * GROUP
    if sinks_ptr is not None:
        sinks = load_sinks(sinks_ptr, first_head + head, exists)
        acc, row_max, row_sum = with_sinks(acc, row_max, row_sum, sinks)
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    out_ptr += (first_token * num_heads + first_head) * HEAD_DIM
    out_offsets = (token * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + out_offsets, out, mask=mask)


@triton.jit
def online_softmax_step(
    q,
    k,
    v,
    k_scales,
    log_v_scales,
    visible,
    acc,
    row_max,
    row_sum,
    scale,
    soft_cap,
    DOT_PRECISION: tl.constexpr,
):
    """Process a tile of queries and a tile of keys; return the new (acc, row_max, row_sum).

    k_scales, log_v_scales: of codes, one for each key; V's as logarithms to base 2. Else None.
    visible: mask of the keys that each query sees; None if it sees all.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=DOT_PRECISION)
    if k_scales is not None:
        scores *= (k_scales * scale)[None, :]
        scale = 1.0
    if soft_cap is not None:
        scores = _soft_capped(scores * scale, soft_cap)
        scale = 1.0
    if log_v_scales is not None:
        # A code of V has weight exp2(score + log2(v_scale)), normalised so that the largest is 1,
        # as for other weights: float16 can represent that for any scales.
        scores = scores * scale + log_v_scales[None, :]
        scale = 1.0
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    # The scale is positive, so the maximum can be taken before scaling. Scaling here is free: a
    # product and a difference are one instruction.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores * scale - new_max[:, None])
    row_sum *= rescale
    if log_v_scales is None:
        row_sum += tl.sum(weights, 1)
    else:
        row_sum += tl.sum(weights * tl.exp2(-log_v_scales)[None, :], 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=DOT_PRECISION)
    return acc, new_max, row_sum


@triton.jit
def load_sinks(sinks_ptr, head, exists):
    """Load the sinks of heads, as scores to base 2: -inf, without weight, for other rows."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.load(sinks_ptr + head, mask=exists, other=float("-inf")) * LOG2_E


@triton.jit
def with_sinks(acc, row_max, row_sum, sinks):
    """Add sinks, which have a score and no value, to the (acc, row_max, row_sum) of some keys.

    It is done after all keys and in float32. If the sum started with them, a sink far above all
    scores would leave weights that 16 bits cannot represent.
    """
    new_max = tl.maximum(row_max, sinks)
    rescale = tl.exp2(row_max - new_max)
    return acc * rescale[:, None], new_max, row_sum * rescale + tl.exp2(sinks - new_max)


@triton.jit
def first_tile(cu_seqlens_q_ptr, row, first_row, BLOCK_Q: tl.constexpr):
    """Return the first tile of `row`; the rows before first_row have one token each."""
    return (tl.load(cu_seqlens_q_ptr + row) - first_row) // BLOCK_Q + row - first_row


@triton.jit
def find_row(cu_seqlens_q_ptr, tile, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """Return the last row whose tiles start at `tile` or before."""
    low, high = first_row, first_row + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if first_tile(cu_seqlens_q_ptr, middle, first_row, BLOCK_Q) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def tiles_seen(first_position, num_keys, sliding_window, TILE_N: tl.constexpr):
    """Return the range (first, end) of key tiles that queries from `first_position` on see."""
    first_seen = 0
    if sliding_window is not None:
        first_seen = tl.maximum(first_position + 1 - sliding_window, 0) // TILE_N
    return first_seen, tl.cdiv(num_keys, TILE_N)


@triton.jit
def _soft_capped(scores, cap):
    """Return cap * tanh(scores / cap), from tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    # In float32 tanh is exactly 1 long before the power of 2 overflows.
    power = tl.minimum(scores * (2 * LOG2_E / cap), 64.0)
    return cap * (1 - 2 / (tl.exp2(power) + 1))
