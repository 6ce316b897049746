"""Attention of rows with few tokens each: what a program of its share of the keys does.

A decode row has a single query and as many keys as any, so the launch is as fast as the memory
reads K and V, if all of the GPU reads to the end. Cutting by rows does not do that: contexts
differ, and while the longest is read, most of the GPU has nothing left. So the tiles of all rows
are numbered through, and cut into equal shares (Stream-K, Osama et al. 2023). Each share has a
program for every KV head. For rows of 5, 1 and 3 tiles and 3 shares, that is 3 tiles each:

    tiles    row 0: 0 1 2 3 4 | row 1: 0 | row 2: 0 1 2
    share           0 0 0 1 1 |        1 |        2 2 2

The programs of one share start side by side. Together they read the heads of a block at about the
same time, which lie side by side, too: head after head, each in a program's own order, the same
launch took a sixth longer on an H100 in a pool of 75 GB.

A share may end in the middle of a row. What a program has of a row that it does not have as a
whole, it leaves in one of its two places for parts: a row that it did not begin can only be its
first, one that it does not end its last. `merge_parts_kernel` puts parts together by their sums of
exponentials (Dao et al. 2023, "Flash-Decoding").

The programs find their shares from the contexts' lengths on the GPU: captured in a CUDA graph, a
launch stays balanced as contexts grow.

A row that guesses has some queries more, and the same keys. Its queries share a tile, so each K and
V is read once for all of them:

    tile row m:  query token m // HEADS,  head m % HEADS of the group

Of a share's keys, early queries may see none. Such a part weighs nothing.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from nanoserve.kernels.triton.paged_attention_kernels import online_softmax_step
from nanoserve.kernels.triton.quantized_kv import as_operand, load_scales

_ROWS = tl.constexpr(256)  # whose lengths are looked at in one go
_PARTS = tl.constexpr(16)  # that are merged in one go


# What changes from step to step is not specialised: values that are 1 or divisible by 16 would
# each compile the kernel anew.
@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def decode_attention_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    parts_ptr,  # float32 [num_shares, 2, QUERIES, num_heads, head_dim]
    lse_ptr,  # float32 [num_shares, 2, QUERIES, num_heads], to base 2
    q_ptr,
    k_ptr,
    v_ptr,
    # None, and what they take is compiled away, or of codes: float32, one for each slot and head.
    k_scales_ptr,
    v_scales_ptr,
    cu_seqlens_q_ptr,  # None: row r has token r alone
    context_lens_ptr,
    block_tables_ptr,
    num_rows,
    row_counts_ptr,  # int32 [2]: all rows, and the decode rows; None, and it is compiled away
    scale,  # times log2(e)
    # If they are None, all that they take is compiled away. Else they are values, not constants:
    # they only set ranges and masks and a factor, and layers that differ in them share a kernel.
    sliding_window,
    soft_cap,  # times log2(e)
    q_token_stride,
    q_head_stride,
    block_stride,
    kv_head_stride,
    slot_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,  # of a row, at most; a power of two
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    V_IN_ROWS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    HEADS: tl.constexpr = BLOCK_M // QUERIES
    if row_counts_ptr is not None:
        num_rows = tl.load(row_counts_ptr + 1)
    kv_head, share = tl.program_id(0), tl.program_id(1)
    size, num_tiles_in_all = _size_of_shares(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, tl.num_programs(1), sliding_window, TILE_N
    )
    at = share * size
    end = tl.minimum(at + size, num_tiles_in_all)
    row, before = _find_row(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, at, sliding_window, TILE_N
    )
    if IS_DEPENDENT:
        cuda.gdc_launch_dependents()  # the merge may come, and wait where we do now:
        cuda.gdc_wait()  # what was before is over, and q, K and V are stored
    if at >= end:
        return

    m, d = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM_PADDED)
    token, head = m // HEADS, m % HEADS
    is_head = head < GROUP
    num_heads = tl.num_programs(0) * GROUP
    head += kv_head * GROUP
    q_ptr += (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    k_ptr += kv_head.to(tl.int64) * kv_head_stride
    v_ptr += kv_head.to(tl.int64) * kv_head_stride
    if k_scales_ptr is not None:
        k_scales_ptr += kv_head.to(tl.int64) * (kv_head_stride // HEAD_DIM)
        v_scales_ptr += kv_head.to(tl.int64) * (kv_head_stride // HEAD_DIM)
    while at < end:
        # 1) Which of the row's tiles.
        context_len = tl.load(context_lens_ptr + row)
        q_start, q_len = _queries(cu_seqlens_q_ptr, row)
        first_seen = _first_seen(context_len - q_len + 1, sliding_window)
        first_tile = first_seen // TILE_N
        num_tiles = tl.cdiv(context_len, TILE_N) - first_tile
        first = at - before
        last = tl.minimum(num_tiles, end - before)

        # 2) Attention over them. int64: in a large cache, block * stride passes 2^31.
        first_token = q_start.to(tl.int64)
        exists = is_head & (token < q_len)
        mask = exists[:, None] & (d < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + first_token * q_token_stride, mask=mask, other=0.0).to(DOT_DTYPE)
        position = context_len - q_len + token
        block_table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
        acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
        row_max = tl.full([BLOCK_M], -3e38, dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
        for tile in range(first_tile + first, first_tile + last):
            key = tile * TILE_N + tl.arange(0, TILE_N)
            # Other table columns and slots hold anything, even NaN.
            is_seen = (key >= first_seen) & (key < context_len)
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
            visible = is_seen[None, :]
            if QUERIES > 1:
                visible &= key[None, :] <= position[:, None]
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

        # 3) The result, or a part of it; and on to the next row.
        result = acc / row_sum[:, None]
        if QUERIES > 1:  # 0 / 0 of who sees no key here; its row_sum's logarithm is -inf
            result = tl.where(row_sum[:, None] > 0, result, 0.0)
        if (first == 0) & (last == num_tiles):
            out_offsets = ((first_token + token) * num_heads + head)[:, None] * HEAD_DIM
            out_offsets += d[None, :]
            tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part = (_part(share, first == 0) * QUERIES + token) * num_heads + head
            tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=exists)
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], result, mask=mask)
        at = before + last
        before += num_tiles
        row += 1


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def merge_parts_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    parts_ptr,  # float32 [num_shares, 2, QUERIES, num_heads, head_dim]
    lse_ptr,  # float32 [num_shares, 2, QUERIES, num_heads], to base 2
    cu_seqlens_q_ptr,
    context_lens_ptr,
    num_rows,
    row_counts_ptr,
    num_shares,
    sliding_window,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_N: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One head of a query in the row in which one share ended and the next one began.

    Its parts' mean, weighted by their sums of exponentials.
    """
    # 1) Which row it is.
    if row_counts_ptr is not None:
        num_rows = tl.load(row_counts_ptr + 1)
    share, num_heads = tl.program_id(1), tl.num_programs(0) // QUERIES
    token, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    size, num_tiles_in_all = _size_of_shares(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, num_shares, sliding_window, TILE_N
    )
    if row_counts_ptr is not None:  # of no rows at all, shares have no tiles, and 0 divides nothing
        size = tl.maximum(size, 1)
    border = (share + 1) * size
    row, before = _find_row(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, border, sliding_window, TILE_N
    )
    if IS_DEPENDENT:  # in every program: the next kernel only waits for this one
        cuda.gdc_wait()
    # Nothing is cut here, or it has been cut before, and that border's program merges it.
    if (border >= num_tiles_in_all) | (before == border) | (before // size != share):
        return
    q_start, q_len = _queries(cu_seqlens_q_ptr, row)
    if token >= q_len:
        return
    context_len = tl.load(context_lens_ptr + row)
    first_tile = _first_seen(context_len - q_len + 1, sliding_window) // TILE_N
    last_share = (before + tl.cdiv(context_len, TILE_N) - first_tile - 1) // size

    # 2) Its parts.
    d = tl.arange(0, HEAD_DIM_PADDED)
    acc = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    largest, total = -3e38, 0.0
    for first in range(share, last_share + 1, _PARTS):
        owner = first + tl.arange(0, _PARTS)
        is_one = owner <= last_share
        part = (_part(owner, owner == share) * QUERIES + token) * num_heads + head
        lse = tl.load(lse_ptr + part, mask=is_one, other=float("-inf"))
        mask = is_one[:, None] & (d < HEAD_DIM)[None, :]
        parts = tl.load(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_largest)
        rescale = tl.exp2(largest - new_largest)
        acc = acc * rescale + tl.sum(weights[:, None] * parts, 0)
        total = total * rescale + tl.sum(weights, 0)
        largest = new_largest
    out = (acc / total).to(out_ptr.dtype.element_ty)
    out_offset = ((q_start + token).to(tl.int64) * num_heads + head) * HEAD_DIM
    tl.store(out_ptr + out_offset + d, out, mask=d < HEAD_DIM)


@triton.jit
def _part(share, is_begun):
    """Where a program leaves its part of a row: of the one that it has begun, or of another's."""
    return 2 * share + is_begun.to(tl.int32)


@triton.jit
def _queries(cu_seqlens_q_ptr, row):
    """A row's first token, and how many it has."""
    if cu_seqlens_q_ptr is None:
        return row, 1
    else:
        start = tl.load(cu_seqlens_q_ptr + row)
        return start, tl.load(cu_seqlens_q_ptr + row + 1) - start


@triton.jit
def _size_of_shares(
    cu_seqlens_q_ptr, context_lens_ptr, num_rows, num_shares, sliding_window, TILE_N: tl.constexpr
):
    """How many tiles a share has, and how many there are in all rows."""
    num_tiles = 0
    for first in range(0, num_rows, _ROWS):
        num_tiles += tl.sum(
            _tiles_of(cu_seqlens_q_ptr, context_lens_ptr, first, num_rows, sliding_window, TILE_N)
        )
    return tl.cdiv(num_tiles, num_shares), num_tiles


@triton.jit
def _find_row(
    cu_seqlens_q_ptr, context_lens_ptr, num_rows, tile, sliding_window, TILE_N: tl.constexpr
):
    """The row that has `tile`, and how many tiles are before that row."""
    row, before, seen = 0, 0, 0
    for first in range(0, num_rows, _ROWS):
        num_tiles = _tiles_of(
            cu_seqlens_q_ptr, context_lens_ptr, first, num_rows, sliding_window, TILE_N
        )
        ends = seen + tl.cumsum(num_tiles)
        is_before = ends <= tile  # beyond the end of all, too, where nobody asks
        row += tl.sum(is_before.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0)))
        seen += tl.sum(num_tiles)
    return row, before


@triton.jit
def _tiles_of(
    cu_seqlens_q_ptr, context_lens_ptr, first, num_rows, sliding_window, TILE_N: tl.constexpr
):
    """Of each of the rows from `first` on, how many tiles of keys its queries see; 0 if no row."""
    rows = first + tl.arange(0, _ROWS)
    context_lens = tl.load(context_lens_ptr + rows, mask=rows < num_rows, other=0)
    first_ends = context_lens  # of the first query's keys
    if cu_seqlens_q_ptr is not None and sliding_window is not None:
        starts = tl.load(cu_seqlens_q_ptr + rows, mask=rows < num_rows, other=0)
        ends = tl.load(cu_seqlens_q_ptr + rows + 1, mask=rows < num_rows, other=1)
        first_ends += starts - ends + 1
    return tl.cdiv(context_lens, TILE_N) - _first_seen(first_ends, sliding_window) // TILE_N


@triton.jit
def _first_seen(num_keys, sliding_window):
    """Of so many keys, the first that the last one's query sees."""
    if sliding_window is None:
        return num_keys * 0
    else:
        return tl.maximum(num_keys - sliding_window, 0)
