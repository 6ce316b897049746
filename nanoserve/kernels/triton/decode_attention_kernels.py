"""Attention of rows with few tokens each: the keys of all rows are split evenly over programs.

A decode row has a single query and as many keys as any other row, so the kernel is limited by the
memory bandwidth for K and V, provided that all of the GPU reads until the end. Splitting by rows
does not achieve that: contexts differ, and while the longest is read, most of the GPU is idle. So
the tiles of all rows are numbered consecutively and split into equal shares (Stream-K, Osama et al.
2023). Each share has a program for every KV head. For rows of 5, 1 and 3 tiles and 3 shares, these
are 3 tiles each:

    tiles    row 0: 0 1 2 3 4 | row 1: 0 | row 2: 0 1 2
    share           0 0 0 1 1 |        1 |        2 2 2

The programs of one share start together. They read the heads of a block at about the same time, and
these are adjacent in memory: if each program read its head in an order of its own, the same launch
took a sixth longer on an H100 with a pool of 75 GB.

A share may end in the middle of a row. The partial result of a row that a program does not compute
completely is stored in one of the share's two partial-result entries: one for a row that it did not
begin, which can only be its first, and one for a row that it does not end, which is its last.
`merge_parts_kernel` combines partial results by their sums of exponentials (Dao et al. 2023,
"Flash-Decoding"). Given counters of arrivals, no second kernel is needed: of the programs of a row,
the one that stores its part last merges all of them, and resets the row's counter. No program waits
for another.

The programs compute their shares from the context lengths on the GPU: captured in a CUDA graph, a
launch stays balanced as contexts grow.

A row with draft tokens has several queries, and the same keys. Its queries share a tile, so each K
and V is read once for all of them:

    tile row m:  query token m // HEADS,  head m % HEADS of the group

Early queries may see none of a share's keys. Such a partial result has weight zero. A row's sinks
are counted in the partial result that has its first tile.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from nanoserve.kernels.triton.paged_attention_kernels import (
    load_sinks,
    online_softmax_step,
    with_sinks,
)
from nanoserve.kernels.triton.quantized_kv import as_operand, load_scales
from nanoserve.kernels.triton.split_work import arrives_last

_ROWS = tl.constexpr(256)  # rows whose lengths are read at once
_PARTS = tl.constexpr(16)  # partial results that are merged at once


# Values that change from step to step are not specialised: values of 1 or divisible by 16 would
# each recompile the kernel.
@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def decode_attention_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    parts_ptr,  # float32 [num_shares, 2, QUERIES, num_heads, head_dim]
    lse_ptr,  # float32 [num_shares, 2, QUERIES, num_heads], to base 2
    arrivals_ptr,  # None (compiled away), or int32 [num_shares, num_kv_heads]: see above
    q_ptr,
    k_ptr,
    v_ptr,
    # None (their code is compiled away), or scales of codes: float32, one by KV slot and head.
    k_scales_ptr,
    v_scales_ptr,
    sinks_ptr,  # float32 [num_heads], or None: compiled away
    cu_seqlens_q_ptr,  # None: row r has token r alone
    context_lens_ptr,
    block_tables_ptr,
    num_rows,
    row_counts_ptr,  # int32 [2]: numbers of rows and of decode rows; None: compiled away
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
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,  # maximum per row; a power of two
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
        cuda.gdc_launch_dependents()  # the merge kernel may start, and wait as we do here:
        cuda.gdc_wait()  # earlier kernels have finished, and q, K and V are stored
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
        # 1) The range of the row's tiles.
        context_len = tl.load(context_lens_ptr + row)
        q_start, q_len = _queries(cu_seqlens_q_ptr, row)
        first_seen = _first_seen(context_len - q_len + 1, sliding_window)
        first_tile = first_seen // TILE_N
        num_tiles = tl.cdiv(context_len, TILE_N) - first_tile
        first = at - before
        last = tl.minimum(num_tiles, end - before)

        # 2) Attention over them. int64: in a large cache, block * stride exceeds 2^31.
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
            # Other table columns and KV slots may contain anything, even NaN.
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

        if sinks_ptr is not None:  # once for each row: with its first tile
            sinks = load_sinks(sinks_ptr, head, exists)
            sinks = tl.where(first == 0, sinks, float("-inf"))
            acc, row_max, row_sum = with_sinks(acc, row_max, row_sum, sinks)

        # 3) Store the complete or partial result, and go on to the next row.
        out_offsets = ((first_token + token) * num_heads + head)[:, None] * HEAD_DIM + d[None, :]
        result = acc / row_sum[:, None]
        if QUERIES > 1:  # 0 / 0 for queries without keys here; log2(row_sum) is -inf
            result = tl.where(row_sum[:, None] > 0, result, 0.0)
        if (first == 0) & (last == num_tiles):
            tl.store(out_ptr + out_offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            part = (_part(share, first == 0) * QUERIES + token) * num_heads + head
            tl.store(lse_ptr + part, row_max + tl.log2(row_sum), mask=exists)
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + d[None, :], result, mask=mask)
            if arrivals_ptr is not None:
                # Of a share's rows only the last continues in the next share, so that the share in
                # which a row begins identifies it.
                begin, last_share = before // size, (before + num_tiles - 1) // size
                arrivals = arrivals_ptr + begin * tl.num_programs(0) + kv_head
                if arrives_last(arrivals, last_share - begin + 1):
                    merged = _merge_all(
                        parts_ptr,
                        lse_ptr,
                        begin,
                        last_share,
                        token,
                        head,
                        num_heads,
                        exists,
                        d,
                        HEAD_DIM,
                        QUERIES,
                    )
                    tl.store(out_ptr + out_offsets, merged.to(out_ptr.dtype.element_ty), mask=mask)
                    tl.store(arrivals, 0)
        at = before + last
        before += num_tiles
        row += 1


@triton.jit
def _merge_all(
    parts_ptr,
    lse_ptr,
    begin,
    last_share,
    token,
    head,
    num_heads,
    exists,
    d,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Return the mean of a row's partial results, weighted by their sums of exponentials.

    Parts are added in the order of their shares, whichever program arrives last.
    """
    mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    acc = tl.zeros([token.shape[0], d.shape[0]], dtype=tl.float32)
    largest = tl.full([token.shape[0]], -3e38, dtype=tl.float32)
    total = tl.zeros([token.shape[0]], dtype=tl.float32)
    for owner in range(begin, last_share + 1):
        part = (_part(owner, owner == begin) * QUERIES + token) * num_heads + head
        # From the L2 cache: other programs have written them while this one ran.
        lse = tl.load(lse_ptr + part, mask=exists, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            parts_ptr + part[:, None] * HEAD_DIM + d[None, :],
            mask=mask,
            other=0.0,
            cache_modifier=".cg",
        )
        new_largest = tl.maximum(largest, lse)
        weight, rescale = tl.exp2(lse - new_largest), tl.exp2(largest - new_largest)
        acc = acc * rescale[:, None] + weight[:, None] * values
        total = total * rescale + weight
        largest = new_largest
    return acc / tl.where(exists, total, 1.0)[:, None]


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
    """Merge one head of a query in the row in which one share ended and the next one began.

    The result is the mean of the partial results, weighted by their sums of exponentials.
    """
    # 1) Find the row.
    if row_counts_ptr is not None:
        num_rows = tl.load(row_counts_ptr + 1)
    share, num_heads = tl.program_id(1), tl.num_programs(0) // QUERIES
    token, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    size, num_tiles_in_all = _size_of_shares(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, num_shares, sliding_window, TILE_N
    )
    if row_counts_ptr is not None:  # without rows, shares have no tiles: avoid a division by 0
        size = tl.maximum(size, 1)
    border = (share + 1) * size
    row, before = _find_row(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, border, sliding_window, TILE_N
    )
    if IS_DEPENDENT:  # in every program, because the next kernel waits only for this one
        cuda.gdc_wait()
    # No row is split here, or its first split is at an earlier border, whose program merges it.
    if (border >= num_tiles_in_all) | (before == border) | (before // size != share):
        return
    q_start, q_len = _queries(cu_seqlens_q_ptr, row)
    if token >= q_len:
        return
    context_len = tl.load(context_lens_ptr + row)
    first_tile = _first_seen(context_len - q_len + 1, sliding_window) // TILE_N
    last_share = (before + tl.cdiv(context_len, TILE_N) - first_tile - 1) // size

    # 2) Merge its partial results.
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
    """Return the entry of a share's partial result: of the row it has begun, or of another."""
    return 2 * share + is_begun.to(tl.int32)


@triton.jit
def _queries(cu_seqlens_q_ptr, row):
    """Return a row's first token and its number of tokens."""
    if cu_seqlens_q_ptr is None:
        return row, 1
    else:
        start = tl.load(cu_seqlens_q_ptr + row)
        return start, tl.load(cu_seqlens_q_ptr + row + 1) - start


@triton.jit
def _size_of_shares(
    cu_seqlens_q_ptr, context_lens_ptr, num_rows, num_shares, sliding_window, TILE_N: tl.constexpr
):
    """Return the number of tiles of a share, and of all rows."""
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
    """Return the row that has `tile`, and the number of tiles before that row."""
    row, before, seen = 0, 0, 0
    for first in range(0, num_rows, _ROWS):
        num_tiles = _tiles_of(
            cu_seqlens_q_ptr, context_lens_ptr, first, num_rows, sliding_window, TILE_N
        )
        ends = seen + tl.cumsum(num_tiles)
        is_before = ends <= tile  # also True for tiles beyond the last, which is not used
        row += tl.sum(is_before.to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0)))
        seen += tl.sum(num_tiles)
    return row, before


@triton.jit
def _tiles_of(
    cu_seqlens_q_ptr, context_lens_ptr, first, num_rows, sliding_window, TILE_N: tl.constexpr
):
    """Return the number of key tiles seen by the queries of each row from `first` on, or 0."""
    rows = first + tl.arange(0, _ROWS)
    context_lens = tl.load(context_lens_ptr + rows, mask=rows < num_rows, other=0)
    first_ends = context_lens  # end of the first query's keys
    if cu_seqlens_q_ptr is not None and sliding_window is not None:
        starts = tl.load(cu_seqlens_q_ptr + rows, mask=rows < num_rows, other=0)
        ends = tl.load(cu_seqlens_q_ptr + rows + 1, mask=rows < num_rows, other=1)
        first_ends += starts - ends + 1
    return tl.cdiv(context_lens, TILE_N) - _first_seen(first_ends, sliding_window) // TILE_N


@triton.jit
def _first_seen(num_keys, sliding_window):
    """Return the first of `num_keys` keys that the query of the last one sees."""
    if sliding_window is None:
        return num_keys * 0
    else:
        return tl.maximum(num_keys - sliding_window, 0)
