"""Decode attention, compiled by numba from the Python below (extra: `nanoserve[cpu]`).

A decode row reads the K and V of its whole context to compute a single token, so what counts is
that every value is read once, in order, and that nothing is written in between. torch has no
operator that reads a paged cache: it must gather the blocks into a copy first. Here a task is a row
and a range of KV heads. It walks over the row's blocks where they lie; the heads of a block are
neighbours in memory, so a block is one long run. The processor fetches ahead within a page of
memory only, so a task also asks for what comes next while it computes.

A row may have a few tokens: its last one, and guesses of those to come. All their heads that share
a KV head go over a block of it one after the other, so that memory gives it once.
"""

import math

import numpy as np
from numba import njit, prange
from numba.extending import overload

from nanoserve.kernels.cpu import fixed_point
from nanoserve.kernels.cpu.attention_tiles import add_values, scores_of
from nanoserve.kernels.cpu.elements import FAST, array_at, exp, store, to_float
from nanoserve.kernels.cpu.quantized_kv import quantize_head
from nanoserve.kernels.cpu.tile_walk import written_by

SOURCES = (
    "attention_tiles",
    "fixed_point",
    "quantized_kv",
    "vectors",
    "elements",
)  # see `written_by`
_LARGEST = np.float32(fixed_point.LARGEST)
_AHEAD = 8192  # bytes
_INNER = {**FAST, "cache": False}  # `attend_decode`, of which they are parts, is kept as a whole


def _walking(inner):
    """`inner`, which is `scores_of` or `add_values`, for all heads, block by block."""

    @njit(**_INNER)
    def walk(heads, of_tokens, cache, scales, blocks, kv_heads, seen, elements):
        """heads [num_heads, head_dim]: queries, or sums; of_tokens [num_heads, length]: scores, or
        weights; seen [num_heads, 2]: each with the tokens from one up to another, and no others."""
        block_size, head_dim = cache.shape[2:]
        share = len(heads) // (kv_heads[1] - kv_heads[0])  # heads that share a KV head
        head_bytes, token_bytes = heads.strides[0], of_tokens.strides[0]
        for i in range(seen[0, 0] // block_size, (seen[-1, 1] + block_size - 1) // block_size):
            start = i * block_size
            low, high = _within(seen[0], start, block_size)
            # Of several tokens, one may see something of this block that another does not.
            is_same = _within(seen[-1], start, block_size) == (low, high)
            for kv_head in range(kv_heads[0], kv_heads[1]):
                own = cache[blocks[i], kv_head].ctypes.data
                own_scales = scales[blocks[i], kv_head].ctypes.data
                soon = _following(cache, blocks, i, kv_head, kv_heads, seen[-1, 1]).ctypes.data
                head, end = (kv_head - kv_heads[0]) * share, (kv_head - kv_heads[0] + 1) * share
                while head < end:
                    is_pair = head + 2 <= end
                    if not is_same:
                        low, high = _within(seen[head], start, block_size)
                        is_pair = is_pair and seen[head + 1, 1] == seen[head, 1]
                    if low < high:
                        head_at = heads.ctypes.data + head * head_bytes, head_bytes
                        at = of_tokens[head, start + low :].ctypes.data, token_bytes
                        here = own + low * cache.strides[2], own_scales + low * scales.strides[2]
                        given = *here, high - low, head_dim, soon
                        if is_pair:
                            inner(2, elements, head_at, at, given)
                        else:
                            inner(1, elements, head_at, at, given)
                    head += 2 if is_pair else 1

    return walk


_find_scores, _add_values = _walking(scores_of), _walking(add_values)


@njit(inline="always", **_INNER)
def _within(seen, start, block_size):
    """What is seen of the block from `start` on: from where, and to where."""
    return max(seen[0] - start, 0), min(seen[1] - start, block_size)


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

        def floats(q, scale, element):
            queries = _floats(q)
            return queries, np.full(len(queries), scale)

        return floats

    def codes(q, scale, element):
        queries = _floats(q)
        codes = np.empty(queries.shape, dtype=np.int16)
        factors = np.empty(len(queries), dtype=np.float32)
        for head in range(len(queries)):
            factors[head] = scale * quantize_head(queries[head], _LARGEST, codes[head])
        return codes, factors

    return codes


@njit(**_INNER)
def _floats(q):
    """[num_heads, head_dim]: those that share a KV head are neighbours, whichever their token."""
    n, num_kv_heads, group, head_dim = q.shape
    queries = np.empty((num_kv_heads, n, group, head_dim), dtype=np.float32)
    for kv_head in range(num_kv_heads):
        for token in range(n):
            for head in range(group):
                for d in range(head_dim):
                    queries[kv_head, token, head, d] = to_float(q[token, kv_head, head, d])
    return queries.reshape(num_kv_heads * n * group, head_dim)


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
def _exists(of_row, blocks, num_tokens, num_blocks, block_size, window):
    """Tell whether a row's tokens are some of the batch's, and the blocks that it reads some of the
    cache's: (its first token, the next row's, its context's length)."""
    start, end, length = of_row
    if not (0 <= start < end <= num_tokens and end - start <= length):
        return False
    if length > len(blocks) * block_size:
        return False
    first = max(0, length - (end - start - 1) - window)
    for i in range(first // block_size, (length + block_size - 1) // block_size):
        if not 0 <= blocks[i] < num_blocks:
            return False
    return True


@njit(**_INNER)
def _attend_row(q, out, cache, scales, blocks, kv_heads, length, options, element):
    """Of a row's last n tokens, the heads q, out [n, num_kv_heads, group, head_dim] that belong to
    a range of KV heads.

    A head takes no part in what its token does not see: behind that may be NaN, or what belongs to
    a wrong guess. So it finds, bit for bit, what it would find if its token were a row.
    """
    scale, window, soft_cap = options
    n, num_kv_heads, group, head_dim = q.shape
    queries, factors = _for_scores(q, scale, element)
    seen = np.empty((len(queries), 2), dtype=np.intp)
    for head in range(len(queries)):
        seen[head, 1] = length - (n - 1) + head // group % n
        seen[head, 0] = max(0, seen[head, 1] - window)
    weights = np.empty((len(queries), length), dtype=np.float32)
    sums = np.zeros(queries.shape, dtype=np.float32)
    place = blocks, kv_heads, seen, (q[0, 0, 0, 0], element)
    _find_scores(queries, weights, cache[0], scales[0], *place)
    for head in range(len(queries)):
        _softmax(weights[head, seen[head, 0] : seen[head, 1]], factors[head], soft_cap)
    _add_values(sums, weights, cache[1], scales[1], *place)
    found = sums.reshape(num_kv_heads, n, group, head_dim)
    for token in range(n):
        for kv_head in range(num_kv_heads):
            for head in range(group):
                for d in range(head_dim):
                    store(out[token, kv_head, head], d, found[kv_head, token, head, d])


def _made(sources):
    """`attend_decode`, for which numba's cache asks for its sources: see `written_by`."""

    @njit(parallel=True, **FAST)
    def attend_decode(addresses, sizes, scale, window, soft_cap, parts, element, cache_element):
        """The cache is [2, num_blocks, num_kv_heads, block_size, head_dim], K before V; what else
        has which shape is said at the top.

        The rows are the first `num_single`, which have one token, and those that `few` lists. All
        take the same code: nothing is compiled when the first row of several tokens comes.

        A cache of codes has scales, one for each token and head; the address of others' is 0. A
        scale is that of a whole head, so it is multiplied into a score, or a weight.

        Returns 0, or how many rows name tokens or blocks that do not exist; those are left out.
        """
        _ = sources
        num_single, num_few, num_tokens, num_heads, num_rows, columns = sizes[:6]
        num_blocks, num_kv_heads, block_size, head_dim = sizes[6:]
        q_at, out_at, starts_at, tables_at, lens_at, cache_at, scales_at, few_at = addresses
        by_token = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
        q, out = array_at(q_at, by_token, element), array_at(out_at, by_token, element)
        starts = array_at(starts_at, (num_rows + 1,), np.int32(0))
        few = array_at(few_at, (num_few,), np.int32(0))
        block_tables = array_at(tables_at, (num_rows, columns), np.int32(0))
        context_lens = array_at(lens_at, (num_rows,), np.int32(0))
        shape = (2, num_blocks, num_kv_heads, block_size)
        cache = array_at(cache_at, (*shape, head_dim), cache_element)
        scales = array_at(scales_at, shape, np.float32(0))
        options = np.float32(scale), window, np.float32(soft_cap)
        kv_heads, num_taken = num_kv_heads // parts, num_single + num_few  # of a task; in all
        num_wrong = 0 if starts[0] == 0 and starts[num_rows] == num_tokens else 1
        for task in prange(parts * num_taken):  # neighbours go to one thread
            part, row = task // num_taken, task % num_taken
            if row >= num_single:
                row = few[row - num_single]
            first, end = part * kv_heads, (part + 1) * kv_heads
            of_row = starts[row], starts[row + 1], context_lens[row]
            if _exists(of_row, block_tables[row], num_tokens, num_blocks, block_size, window):
                _attend_row(
                    q[starts[row] : starts[row + 1], first:end],
                    out[starts[row] : starts[row + 1], first:end],
                    cache,
                    scales,
                    block_tables[row],
                    (first, end),
                    context_lens[row],
                    options,
                    cache_element,
                )
            else:
                num_wrong += 1
        return num_wrong

    return attend_decode


attend_decode = _made(written_by(*SOURCES))
