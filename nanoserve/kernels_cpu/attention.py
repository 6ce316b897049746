"""Decode attention, compiled by numba from the Python below (extra: `nanoserve[cpu]`).

A decode row reads the K and V of its whole context to compute a single token, so what counts is
that every value is read once, in order, and that nothing is written in between. torch has no
operator that reads a paged cache: it must gather the blocks into a copy first. Here a task is a row
and a range of KV heads. It walks over the row's blocks where they lie; the heads of a block are
neighbours in memory, so a block is one long run. The processor fetches ahead within a page of
memory only, so a task also asks for what comes next while it computes.
"""

import math

import numpy as np
from numba import njit, prange
from numba.extending import overload

from nanoserve.kernels_cpu import fixed_point
from nanoserve.kernels_cpu.attention_tiles import add_values, scores_of
from nanoserve.kernels_cpu.quantized_kv import quantize_head
from nanoserve.kernels_cpu.tile_walk import written_by
from nanoserve.kernels_cpu.values import FAST, array_at, exp, store, to_float

SOURCES = "attention_tiles", "fixed_point", "quantized_kv", "vectors", "values"  # see `written_by`
_LARGEST = np.float32(fixed_point.LARGEST)
_AHEAD = 8192  # bytes
_INNER = {**FAST, "cache": False}  # `attend_decode`, of which they are parts, is kept as a whole


def _walking(inner):
    """`inner`, which is `scores_of` or `add_values`, for all heads, block by block."""

    @njit(**_INNER)
    def walk(heads, of_tokens, cache, scales, blocks, kv_heads, first, length, elements):
        """With tokens [first, length). heads [num_heads, head_dim]: queries, or sums; of_tokens
        [num_heads, length]: scores, or weights."""
        block_size, head_dim = cache.shape[2:]
        group = len(heads) // (kv_heads[1] - kv_heads[0])
        head_bytes, token_bytes = heads.strides[0], of_tokens.strides[0]
        for i in range(first // block_size, (length + block_size - 1) // block_size):
            start = i * block_size
            low, high = max(first - start, 0), min(length - start, block_size)
            for kv_head in range(kv_heads[0], kv_heads[1]):
                own = cache[blocks[i], kv_head, low:high].ctypes.data
                own_scales = scales[blocks[i], kv_head, low:high].ctypes.data
                soon = _following(cache, blocks, i, kv_head, kv_heads, length).ctypes.data
                given = own, own_scales, high - low, head_dim, soon
                head, end = (kv_head - kv_heads[0]) * group, (kv_head - kv_heads[0] + 1) * group
                while head < end:
                    head_at = heads.ctypes.data + head * head_bytes, head_bytes
                    at = of_tokens[head, start + low :].ctypes.data, token_bytes
                    if head + 2 <= end:
                        inner(2, elements, head_at, at, given)
                    else:
                        inner(1, elements, head_at, at, given)
                    head += 2

    return walk


_find_scores, _add_values = _walking(scores_of), _walking(add_values)


@njit(**_INNER)
def _following(cache, blocks, i, kv_head, kv_heads, length):
    """[block_size, head_dim]: what is read `_AHEAD` bytes, or a little more, after this head."""
    block_size, heads = cache.shape[2], kv_heads[1] - kv_heads[0]
    place = kv_head - kv_heads[0] + (_AHEAD + cache[0, 0].nbytes - 1) // cache[0, 0].nbytes
    i = min(i + place // heads, (length - 1) // block_size)
    return cache[blocks[i], kv_heads[0] + place % heads]


def _for_scores(q, scale, element):
    """(what `scores_of` takes for the heads q, the factor of each head's scores)."""


@overload(_for_scores)
def _floats_or_codes(q, scale, element):
    if not fixed_point.is_for(q.dtype, element):
        return lambda q, scale, element: (_floats(q), np.full(len(q), scale))

    def codes(q, scale, element):
        queries = _floats(q)
        codes, factors = np.empty(q.shape, dtype=np.int16), np.empty(len(q), dtype=np.float32)
        for head in range(len(q)):
            factors[head] = scale * quantize_head(queries[head], _LARGEST, codes[head])
        return codes, factors

    return codes


@njit(**_INNER)
def _floats(q):
    queries = np.empty(q.shape, dtype=np.float32)
    for head in range(len(q)):
        for d in range(q.shape[1]):
            queries[head, d] = to_float(q[head, d])
    return queries


@njit(**_INNER)
def _softmax(scores, factor, soft_cap):
    for t in range(len(scores)):
        scores[t] *= factor
    if soft_cap > 0:
        for t in range(len(scores)):
            scores[t] = soft_cap * math.tanh(scores[t] / soft_cap)
    # As integers, of which vectors are made: floats that may be NaN are compared one by one.
    bits, highest = scores.view(np.int32), np.int32(-(2**31))
    for t in range(len(bits)):
        highest = max(highest, _ordered(bits[t]))
    largest, total = _ordered(highest).view(np.float32), np.float32(0)
    for t in range(len(scores)):
        scores[t] = exp(scores[t] - largest)
        total += scores[t]
    for t in range(len(scores)):
        scores[t] /= total


@njit(inline="always", **_INNER)
def _ordered(bits):
    """A float's bits as an integer that is the larger, the larger the float; and back."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(**_INNER)
def _attend_row(q, out, cache, scales, blocks, kv_heads, length, options, element):
    """Of one row, the heads q, out [num_heads, head_dim] that belong to a range of KV heads."""
    scale, window, soft_cap = options
    first = max(0, length - window)
    queries, factors = _for_scores(q, scale, element)
    weights = np.empty((len(q), length), dtype=np.float32)
    sums = np.zeros(q.shape, dtype=np.float32)
    place = blocks, kv_heads, first, length, (q[0, 0], element)
    _find_scores(queries, weights, cache[0], scales[0], *place)
    for head in range(len(q)):
        _softmax(weights[head, first:], factors[head], soft_cap)
    _add_values(sums, weights, cache[1], scales[1], *place)
    for head in range(len(q)):
        for d in range(q.shape[1]):
            store(out[head], d, sums[head, d])


def _made(sources):
    """`attend_decode`, for which numba's cache asks for its sources: see `written_by`."""

    @njit(parallel=True, **FAST)
    def attend_decode(addresses, sizes, scale, window, soft_cap, parts, element, cache_element):
        """For the cache see `AttentionBackend`; what has which shape is said at the top.

        A cache of codes has scales, see `nanoserve.attention.quantized_kv`; the address of others'
        is 0. A scale is that of a whole head, so it is multiplied into a score, or a weight.
        """
        _ = sources
        num_rows, num_heads, columns, num_blocks, num_kv_heads, block_size, head_dim = sizes
        q_at, out_at, tables_at, lens_at, cache_at, scales_at = addresses
        q = array_at(q_at, (num_rows, num_heads, head_dim), element)
        out = array_at(out_at, (num_rows, num_heads, head_dim), element)
        block_tables = array_at(tables_at, (num_rows, columns), np.int32(0))
        context_lens = array_at(lens_at, (num_rows,), np.int32(0))
        shape = (2, num_blocks, num_kv_heads, block_size)
        cache = array_at(cache_at, (*shape, head_dim), cache_element)
        scales = array_at(scales_at, shape, np.float32(0))
        options = np.float32(scale), window, np.float32(soft_cap)
        heads, kv_heads = num_heads // parts, num_kv_heads // parts  # of a task
        for task in prange(parts * num_rows):  # neighbours go to one thread
            part, row = task // num_rows, task % num_rows
            _attend_row(
                q[row, part * heads : (part + 1) * heads],
                out[row, part * heads : (part + 1) * heads],
                cache,
                scales,
                block_tables[row],
                (part * kv_heads, (part + 1) * kv_heads),
                context_lens[row],
                options,
                cache_element,
            )

    return attend_decode


attend_decode = _made(written_by(*SOURCES))
