"""Attention over the paged KV cache in Triton: one kernel for prefill, chunks and decode.

The K and V of a sequence lie in blocks that its block table lists (Kwon et al. 2023, "Efficient
memory management for large language model serving with PagedAttention"). With block size 16 and
the block table [5, 2, 8, 12], position 35 is offset 3 of the sequence's block 2, which is block 8
of the cache: slot 8 * 16 + 3 = 131. The kernel looks up every position like this, so the number of
keys it takes at once has nothing to do with the block size.

A program computes one tile of queries of one KV head. All query heads that read this KV head are
rows of the tile (grouped-query attention), so every K and V is loaded once for all of them:

    tile row m:  query token m // GROUP_PADDED,  head m % GROUP_PADDED of the group

It walks over the keys with the online softmax (Dao et al. 2022, "FlashAttention"): `row_max` and
`row_sum` are the maximum and the sum of exponentials of the scores so far, and what was accumulated
is rescaled whenever the maximum grows. Exponentials are to base 2, which is what the hardware
computes; the factor log2(e) is folded into the scale.

With a sliding window (Beltagy et al. 2020, "Longformer") a query sees its last `sliding_window`
tokens and nothing before them. The walk then begins at the first tile that a query of the program
sees, so that a decode row costs no more than its window, however long its context grows. With a
soft cap c (Gemma Team 2024, "Gemma 2"), scores become c tanh(score / c).

A decode row has a single query but as many keys as any, and a few rows would leave most of a GPU
idle. Its keys are therefore split over several programs (Dao et al. 2023, "Flash-Decoding"), and
`merge_splits_kernel` puts the parts together.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_LOG2_E = math.log2(math.e)
_MAX_SPLITS = 64  # the merge holds all parts of a head in registers
_MIN_TILES_PER_SPLIT = 4  # less work than this does not pay for the merge
_PROGRAMS_PER_MULTIPROCESSOR = 2  # that at least run at once, by their shared memory
_MULTIPROCESSORS_WITHOUT_GPU = 8  # under the interpreter: enough that tests see splits


class TileConfig(NamedTuple):
    """How a program is cut to the hardware."""

    block_m: int  # rows of a query tile: tokens times heads of a group
    tile_n: int  # keys at once
    num_warps: int
    num_stages: int  # of the pipeline: with 5, block tables are read four tiles ahead, K and V two


def tile_config(head_dim: int, dtype: torch.dtype, group: int, is_decode: bool) -> TileConfig:
    """The largest tiles that stay within registers and shared memory, as ptxas reports them."""
    wide, full_precision = head_dim > 128, dtype == torch.float32
    # The tensor cores do no full float32: its operands go through registers, in small tiles.
    if is_decode:  # as fast as the memory: what counts is the bytes under way
        tile_n = 16 if full_precision else 32 if wide else 64
        config = TileConfig(block_m=16, tile_n=tile_n, num_warps=4, num_stages=5)
    elif full_precision:
        tile_n = 16 if wide else 32
        num_warps = 16 if head_dim > 64 else 8
        config = TileConfig(block_m=32, tile_n=tile_n, num_warps=num_warps, num_stages=5)
    else:  # as fast as the tensor cores: large tiles use every K and V often
        config = TileConfig(block_m=128, tile_n=32 if wide else 64, num_warps=8, num_stages=5)
    return config._replace(block_m=max(config.block_m, triton.next_power_of_2(group)))


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
    num_splits: int | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Attends from every query token to the keys of its sequence up to itself.

    q             [num_tokens, num_heads, head_dim], float32, float16 or bfloat16
    kv_cache      [2, num_blocks, num_kv_heads, block_size, head_dim], of q's dtype
    cu_seqlens_q  int32 [num_rows + 1]: row r has the tokens cu_seqlens_q[r : r + 2]
    context_lens  int32 [num_rows]; a row's tokens are the last ones of its context
    block_tables  int32 [num_rows, max_blocks]; columns beyond the context are never read,
                  nor are those before all windows of the row

    The last dimension of q and kv_cache must be contiguous; all other strides are free. The first
    `num_decode_rows` rows have one token each. `num_splits` is chosen if it is None. A query sees
    `sliding_window` tokens, its own included, or all; c = `soft_cap` makes its scaled scores
    c tanh(score / c). Returns [num_tokens, num_heads, head_dim], contiguous, in q's dtype.

    The host looks at no tensor's values, and every program finds its share of the work on the GPU:
    captured in a CUDA graph, a launch stays right as contexts grow.
    """
    batch = _Batch(
        *(q, kv_cache, cu_seqlens_q, context_lens, block_tables), scale, sliding_window, soft_cap
    )
    _check(batch)
    (_, num_heads, head_dim), num_kv_heads = q.shape, kv_cache.shape[2]
    group, num_chunks = num_heads // num_kv_heads, len(context_lens) - num_decode_rows
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_decode_rows > 0:
        config = tile_config(head_dim, q.dtype, group, is_decode=True)
        if num_splits is None:
            num_programs = num_decode_rows * num_kv_heads
            num_keys = min(max_context_len, sliding_window or max_context_len)
            num_splits = _choose_num_splits(num_programs, num_keys, config.tile_n, q.device)
        if num_splits == 1:
            _launch(batch, config, out, None, 0, num_decode_rows, is_decode=True)
        else:
            shape = (num_decode_rows, num_heads, num_splits)
            parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
            lse = torch.empty(shape, dtype=torch.float32, device=q.device)
            _launch(batch, config, parts, lse, 0, num_decode_rows, is_decode=True)
            _merge_splits(out, parts, lse, context_lens, sliding_window, config.tile_n)
    if num_chunks > 0:
        config = tile_config(head_dim, q.dtype, group, is_decode=False)
        _launch(batch, config, out, None, num_decode_rows, num_chunks, is_decode=False)
    return out


class _Batch(NamedTuple):
    q: torch.Tensor
    kv_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    sliding_window: int | None
    soft_cap: float | None


def _check(batch: _Batch) -> None:
    q, kv_cache, *indices = batch[:5]
    if q.dim() != 3 or kv_cache.dim() != 5 or kv_cache.shape[0] != 2:
        raise ValueError(f"q {list(q.shape)} must be 3-D, kv_cache {list(kv_cache.shape)} [2, ...]")
    if q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} heads are no multiple of {kv_cache.shape[2]} KV heads")
    if kv_cache.shape[4] != q.shape[2]:
        raise ValueError(f"head_dim is {q.shape[2]} in q and {kv_cache.shape[4]} in kv_cache")
    if q.stride(-1) != 1 or kv_cache.stride(-1) != 1:
        raise ValueError(f"last strides must be 1: q {q.stride()}, kv_cache {kv_cache.stride()}")
    if q.dtype not in _TRITON_DTYPES or kv_cache.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype} and kv_cache {kv_cache.dtype}: not supported")
    if batch.sliding_window is not None and batch.sliding_window < 1:
        raise ValueError(f"sliding_window={batch.sliding_window}: a query sees at least itself")
    if batch.soft_cap is not None and not batch.soft_cap > 0:
        raise ValueError(f"soft_cap={batch.soft_cap} must be positive")
    lengths = [len(tensor) for tensor in indices]
    if lengths != [lengths[1] + 1, lengths[1], lengths[1]]:
        raise ValueError(
            f"cu_seqlens_q, context_lens and block_tables have lengths {lengths}: "
            f"must be num_rows + 1, num_rows, num_rows"
        )
    for tensor in indices:
        if tensor.dtype != torch.int32 or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
            raise ValueError(
                f"indices must be int32 with last stride 1, not {tensor.dtype}, {tensor.stride()}"
            )


def _choose_num_splits(num_programs: int, num_keys: int, tile_n: int, device: torch.device) -> int:
    """Programs enough to fill the GPU, but none with too few keys to be worth it."""
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(device) // num_programs
    worthwhile = num_keys // (_MIN_TILES_PER_SPLIT * tile_n)
    num_splits = max(1, min(wanted, worthwhile, _MAX_SPLITS))
    return 1 << (num_splits.bit_length() - 1)  # powers of two: few variants of the merge


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    batch: _Batch,
    config: TileConfig,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    first_row: int,
    num_rows: int,
    is_decode: bool,
) -> None:
    """Attends for rows [first_row, first_row + num_rows), into `out` or into parts and `lse`."""
    q, kv_cache, cu_seqlens_q, context_lens, block_tables, scale, sliding_window, soft_cap = batch
    num_tokens, num_heads, head_dim = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    # A decode row has one token: its tile holds nothing but heads.
    group_padded = config.block_m if is_decode else triton.next_power_of_2(group)
    num_tiles = num_rows
    if not is_decode:
        # How many tiles a row needs is in cu_seqlens_q, which the host does not look at. Row r
        # starts at tile (tokens before it) // block_q + r, which always leaves room enough.
        num_tiles += (num_tokens - first_row) // (config.block_m // group_padded)
    interpreted = triton.knobs.runtime.interpret  # which misreads bfloat16 in products
    grid = (num_tiles * num_kv_heads, 1 if lse is None else lse.shape[2])
    paged_attention_kernel[grid](
        out,
        lse,
        q,
        *kv_cache,
        cu_seqlens_q,
        context_lens,
        block_tables,
        first_row,
        num_rows,
        num_kv_heads,
        scale * _LOG2_E,
        sliding_window,
        None if soft_cap is None else soft_cap * _LOG2_E,
        *q.stride()[:2],
        *kv_cache.stride()[1:4],
        block_tables.stride(0),
        GROUP=group,
        GROUP_PADDED=group_padded,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        TILE_N=config.tile_n,
        DOT_DTYPE=tl.float32 if interpreted else _TRITON_DTYPES[q.dtype],
        DOT_PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        IS_DECODE=is_decode,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _merge_splits(
    out: torch.Tensor,
    parts: torch.Tensor,
    lse: torch.Tensor,
    context_lens: torch.Tensor,
    sliding_window: int | None,
    tile_n: int,
) -> None:
    num_rows, num_heads, num_splits, head_dim = parts.shape
    merge_splits_kernel[(num_rows * num_heads,)](
        out,
        parts,
        lse,
        context_lens,
        num_splits,
        sliding_window,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
        SPLITS_PADDED=_MAX_SPLITS,  # one variant, whatever the batch
        TILE_N=tile_n,
    )


# What changes from step to step is not specialised: values that are 1 or divisible by 16 would
# each compile the kernel anew.
@triton.jit(do_not_specialize=["first_row", "num_rows", "table_stride"])
def paged_attention_kernel(
    out_ptr,  # [num_tokens, num_heads, num_splits, head_dim]
    lse_ptr,  # [num_tokens, num_heads, num_splits], to base 2; None if there is one split
    q_ptr,
    k_ptr,
    v_ptr,
    cu_seqlens_q_ptr,
    context_lens_ptr,
    block_tables_ptr,
    first_row,
    num_rows,
    num_kv_heads,
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
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    IS_DECODE: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_PADDED
    kv_head = tl.program_id(0) % num_kv_heads
    tile = tl.program_id(0) // num_kv_heads
    split, num_splits = tl.program_id(1), tl.num_programs(1)

    if IS_DECODE:
        row = first_row + tile
        q_tile = 0
    else:
        row = _find_row(cu_seqlens_q_ptr, tile, first_row, num_rows, BLOCK_Q)
        q_tile = tile - _first_tile(cu_seqlens_q_ptr, row, first_row, BLOCK_Q)
    q_start = tl.load(cu_seqlens_q_ptr + row)
    q_len = tl.load(cu_seqlens_q_ptr + row + 1) - q_start
    num_q_tiles = tl.cdiv(q_len, BLOCK_Q)
    if q_tile >= num_q_tiles:
        return  # the room that a row does not need
    q_tile = num_q_tiles - 1 - q_tile  # late queries see the most keys: they start first
    context_len = tl.load(context_lens_ptr + row)
    first_position = context_len - q_len + q_tile * BLOCK_Q

    num_keys = tl.minimum(context_len, first_position + BLOCK_Q)
    first, last = _share(split, num_splits, first_position, num_keys, sliding_window, TILE_N)
    if first >= last:
        return  # more programs than tiles
    # Only in the first and in the last few tiles of keys does it matter who sees what: the plain
    # ones between them begin where the last query's window does, and end at the first query.
    plain_first = first
    plain_last = tl.minimum(tl.maximum(first, (first_position + 1) // TILE_N), last)
    if sliding_window is not None:
        plain_first = tl.maximum(first, tl.cdiv(num_keys - sliding_window, TILE_N))
        plain_first = tl.minimum(plain_first, plain_last)
    num_plain = plain_last - plain_first

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM_PADDED)
    token, head = m // GROUP_PADDED, m % GROUP_PADDED  # counted from the first of the tile
    exists = (token < q_len - q_tile * BLOCK_Q) & (head < GROUP)
    mask = exists[:, None] & (d < HEAD_DIM)[None, :]
    # int64: in a large batch, token * stride may pass 2^31; in a large cache, block * stride does.
    first_token, first_head = (q_start + q_tile * BLOCK_Q).to(tl.int64), kv_head * GROUP
    q_ptr += first_token * q_token_stride + first_head * q_head_stride
    q_offsets = (token * q_token_stride + head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=mask, other=0.0).to(DOT_DTYPE)

    position = first_position + token
    if sliding_window is not None:  # so that rows of no token, too, see some key
        position = tl.minimum(position, num_keys - 1)
    k_ptr += kv_head.to(tl.int64) * kv_head_stride
    v_ptr += kv_head.to(tl.int64) * kv_head_stride
    block_table_ptr = block_tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], dtype=tl.float32)
    # Of several queries, a later one's window may begin behind the first tile: there, its scores
    # are -inf only. With a finite maximum they weigh exp2(-inf) = 0; with -inf it would be NaN.
    # In the end every row has seen a key: its own, and in a split, of one query, one in each tile.
    row_max = tl.full([BLOCK_M], -3e38, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for MASKED in tl.static_range(2):  # the body is compiled twice, without masks and with
        begin = first + num_plain if MASKED else plain_first
        end = last if MASKED else plain_last
        for i in range(begin, end):
            n_tile = i
            if MASKED and sliding_window is not None:  # first the tiles before the plain ones
                n_tile = tl.where(i < plain_last, i - num_plain, i)
            key = n_tile * TILE_N + tl.arange(0, TILE_N)
            # A mask that is true everywhere costs nothing: the compiler drops it.
            is_seen = tl.full([TILE_N], True, tl.int1)
            if MASKED:  # other table columns and slots hold anything, even NaN
                is_seen = key < context_len
                if sliding_window is not None:
                    is_seen &= key > first_position - sliding_window
            kv_mask = is_seen[:, None] & tl.full([TILE_N, HEAD_DIM_PADDED], True, tl.int1)
            if HEAD_DIM < HEAD_DIM_PADDED:
                kv_mask &= (d < HEAD_DIM)[None, :]
            block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=is_seen, other=0)
            slot = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * slot_stride
            kv_offsets = slot[:, None] + d[None, :]
            k = tl.load(k_ptr + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)
            v = tl.load(v_ptr + kv_offsets, mask=kv_mask, other=0.0).to(DOT_DTYPE)

            scores = tl.dot(q, tl.trans(k), input_precision=DOT_PRECISION) * scale
            if soft_cap is not None:
                scores = _soft_capped(scores, soft_cap)
            if MASKED:
                visible = key[None, :] <= position[:, None]
                if sliding_window is not None:
                    visible &= key[None, :] > position[:, None] - sliding_window
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            rescale = tl.exp2(row_max - new_max)
            weights = tl.exp2(scores - new_max[:, None])
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = acc * rescale[:, None]
            acc = tl.dot(weights.to(DOT_DTYPE), v, acc, input_precision=DOT_PRECISION)
            row_max = new_max

    num_heads = num_kv_heads * GROUP
    first_out = (first_token * num_heads + first_head) * num_splits + split
    out_rows = (token * num_heads + head) * num_splits
    if lse_ptr is not None:
        tl.store(lse_ptr + first_out + out_rows, row_max + tl.log2(row_sum), mask=exists)
    out = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)
    out_offsets = out_rows[:, None] * HEAD_DIM + d[None, :]
    tl.store(out_ptr + first_out * HEAD_DIM + out_offsets, out, mask=mask)


@triton.jit
def _first_tile(cu_seqlens_q_ptr, row, first_row, BLOCK_Q: tl.constexpr):
    """Where the tiles of `row` start; the rows before first_row have one token each."""
    return (tl.load(cu_seqlens_q_ptr + row) - first_row) // BLOCK_Q + row - first_row


@triton.jit
def _find_row(cu_seqlens_q_ptr, tile, first_row, num_rows, BLOCK_Q: tl.constexpr):
    """The last row whose tiles start at `tile` or before."""
    low, high = first_row, first_row + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if _first_tile(cu_seqlens_q_ptr, middle, first_row, BLOCK_Q) <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _share(split, num_splits, first_position, num_keys, sliding_window, TILE_N: tl.constexpr):
    """Of the tiles of keys that queries from `first_position` on see: from where, and to where.

    Where the first is not before the last, nothing is left for this split.
    """
    first_seen = 0
    if sliding_window is not None:
        first_seen = tl.maximum(first_position + 1 - sliding_window, 0) // TILE_N
    end = tl.cdiv(num_keys, TILE_N)
    tiles_per_split = tl.cdiv(end - first_seen, num_splits)
    first = first_seen + split * tiles_per_split
    return first, tl.minimum(first + tiles_per_split, end)


@triton.jit
def _soft_capped(scores, cap):
    """cap * tanh(scores / cap), from tanh(x) = 1 - 2 / (exp(2 x) + 1)."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    # tanh is 1, to the last bit of a float32, long before the power of 2 overflows.
    power = tl.minimum(scores * (2 * LOG2_E / cap), 64.0)
    return cap * (1 - 2 / (tl.exp2(power) + 1))


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    out_ptr,  # [num_tokens, num_heads, head_dim]
    parts_ptr,  # float32 [num_tokens, num_heads, num_splits, head_dim]
    lse_ptr,  # float32 [num_tokens, num_heads, num_splits]
    context_lens_ptr,
    num_splits,
    sliding_window,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """One head of one token: the parts' mean, weighted by their sums of exponentials."""
    head = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, SPLITS_PADDED), tl.arange(0, HEAD_DIM_PADDED)
    context_len = tl.load(context_lens_ptr + head // NUM_HEADS)
    # The programs whose share was empty have written nothing, nor have those that do not exist.
    # All others have: a decode row has one query, and it sees a key of every tile of its share.
    first, _ = _share(split, num_splits, context_len - 1, context_len, sliding_window, TILE_N)
    written = first * TILE_N < context_len
    lse_ptrs = lse_ptr + head * num_splits + split
    lse = tl.load(lse_ptrs, mask=written, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    part_offsets = (head * num_splits + split)[:, None] * HEAD_DIM + d[None, :]
    mask = written[:, None] & (d < HEAD_DIM)[None, :]
    parts = tl.load(parts_ptr + part_offsets, mask=mask, other=0.0)
    out = tl.sum(weights[:, None] * parts, 0) / tl.sum(weights, 0)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * HEAD_DIM + d, out, mask=d < HEAD_DIM)
