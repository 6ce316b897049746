"""Attention for CPUs, compiled by numba from the Python below (extra: `nanoserve[cpu]`).

A decode row reads the K and V of its whole context to compute a single token, so memory bandwidth
is the limit: every value should be read once, in order, without intermediate copies. torch has no
operator that reads a paged cache: it must first gather the blocks into a copy. Here a task is a row
and a range of KV heads. It iterates over the row's blocks in place; the heads of a block are
adjacent in memory, so a block is one contiguous run. Hardware prefetchers stop at the end of a
memory page, so a task also prefetches the following head while it computes.

A row with several tokens is cut into pieces. All query heads of a piece that share a KV head
process one block of it before the next, so that it is read from memory once. For every token, the
additions have the same order, however many tokens a piece has: attention is batch-invariant.
"""

import math

import numpy as np
from numba import njit, prange
from numba.extending import overload

from nanoserve.kernels.cpu import fixed_point
from nanoserve.kernels.cpu.attention_tiles import add_values, scores_of
from nanoserve.kernels.cpu.elements import FAST, array_at, exp, store, to_float
from nanoserve.kernels.cpu.store_kv import quantize_head
from nanoserve.kernels.cpu.tile_walk import written_by

SOURCES = (
    "attention_tiles",
    "fixed_point",
    "store_kv",
    "vectors",
    "elements",
)  # see `written_by`
_LARGEST = np.float32(fixed_point.LARGEST)
_AHEAD = 8192  # prefetch distance in bytes
_INNER = {**FAST, "cache": False}  # inner functions are cached as parts of `attend`


def _walking(inner):
    """Return a function that runs `inner` (`scores_of` or `add_values`) block by block."""

    @njit(**_INNER)
    def walk(heads, of_tokens, cache, scales, blocks, kv_heads, seen, elements):
        """Run `inner` for all heads.

        heads [num_heads, head_dim]: queries or sums. of_tokens [num_heads, length]: scores or
        weights. seen [num_heads, 2]: each head attends to the tokens [first, end) and no others.
        """
        block_size, head_dim = cache.shape[2:]
        share = len(heads) // (kv_heads[1] - kv_heads[0])  # heads that share a KV head
        head_bytes, token_bytes = heads.strides[0], of_tokens.strides[0]
        for i in range(seen[0, 0] // block_size, (seen[-1, 1] + block_size - 1) // block_size):
            start = i * block_size
            low, high = _within(seen[0], start, block_size)
            # With several tokens in a row, they may attend to different parts of this block.
            is_same = _within(seen[-1], start, block_size) == (low, high)
            for kv_head in range(kv_heads[0], kv_heads[1]):
                own = cache[blocks[i], kv_head].ctypes.data
                own_scales = scales[blocks[i], kv_head].ctypes.data
                soon = _following(cache, blocks, i, kv_head, kv_heads, seen[-1, 1]).ctypes.data
                head, end = (kv_head - kv_heads[0]) * share, (kv_head - kv_heads[0] + 1) * share
                while head < end:
                    if not is_same:
                        low, high = _within(seen[head], start, block_size)
                    count = 1
                    for size in (6, 2):  # as many as `inner` takes at once
                        fits = count == 1 and head + size <= end
                        if fits and (is_same or seen[head + size - 1, 1] == seen[head, 1]):
                            count = size
                    if low < high:
                        head_at = heads.ctypes.data + head * head_bytes, head_bytes
                        at = of_tokens[head, start + low :].ctypes.data, token_bytes
                        here = own + low * cache.strides[2], own_scales + low * scales.strides[2]
                        given = *here, high - low, head_dim, soon
                        if count == 6:
                            inner(6, elements, head_at, at, given)
                        elif count == 2:
                            inner(2, elements, head_at, at, given)
                        else:
                            inner(1, elements, head_at, at, given)
                    head += count

    return walk


_find_scores, _add_values = _walking(scores_of), _walking(add_values)


@njit(inline="always", **_INNER)
def _within(seen, start, block_size):
    """Return the range [first, end), within the block that begins at `start`, to attend to."""
    return max(seen[0] - start, 0), min(seen[1] - start, block_size)


@njit(**_INNER)
def _following(cache, blocks, i, kv_head, kv_heads, length):
    """Return K or V [block_size, head_dim] that is read at least `_AHEAD` bytes after this head."""
    block_size, heads = cache.shape[2], kv_heads[1] - kv_heads[0]
    place = kv_head - kv_heads[0] + (_AHEAD + cache[0, 0].nbytes - 1) // cache[0, 0].nbytes
    i = min(i + place // heads, (length - 1) // block_size)
    return cache[blocks[i], kv_heads[0] + place % heads]


def _for_scores(q, scale, element):
    """Return (the queries in the form that `scores_of` takes, the factor of each head's scores)."""


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
    """Return the queries as float32 [num_heads, head_dim], grouped by their KV head."""
    n, num_kv_heads, group, head_dim = q.shape
    queries = np.empty((num_kv_heads, n, group, head_dim), dtype=np.float32)
    for kv_head in range(num_kv_heads):
        for token in range(n):
            for head in range(group):
                for d in range(head_dim):
                    queries[kv_head, token, head, d] = to_float(q[token, kv_head, head, d])
    return queries.reshape(num_kv_heads * n * group, head_dim)


@njit(**_INNER)
def _softmax(scores, factor, soft_cap, sink):
    """Replace scores by their weights. sink: [1] of the head, or [0]: see `AttentionLayer`."""
    for t in range(len(scores)):
        scores[t] *= factor
    if soft_cap > 0:
        for t in range(len(scores)):
            scores[t] = soft_cap * math.tanh(scores[t] / soft_cap)
    # Compare as integers, which vectorises: comparisons of floats that may be NaN do not.
    bits, highest = scores.view(np.int32), np.int32(-(2**31))
    for t in range(len(bits)):
        highest = max(highest, _ordered(bits[t]))
    largest, total = _ordered(highest).view(np.float32), np.float32(0)
    if len(sink):
        largest = max(largest, sink[0])
    for t in range(len(scores)):
        scores[t] = exp(scores[t] - largest)
        total += scores[t]
    if len(sink):
        total += exp(sink[0] - largest)
    for t in range(len(scores)):
        scores[t] /= total


@njit(inline="always", **_INNER)
def _ordered(bits):
    """Map a float's bits to an integer of the same order; the map is its own inverse."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(**_INNER)
def _exists(of_row, blocks, num_tokens, num_blocks, block_size, window):
    """Return True if a row's tokens are within the batch and its blocks within the cache.

    of_row: (its first token, the next row's first token, its context length).
    """
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
def _attend_row(q, out, cache, scales, blocks, kv_heads, of_row, options, element):
    """Compute attention of a row's last n tokens, for a range of KV heads.

    q, out: [num_tokens, num_kv_heads, group, head_dim], of the batch. of_row: as for `_exists`.

    Positions outside of a token's range are skipped, not masked: the cache may hold NaN there, or
    K and V of rejected draft tokens. So the result equals, bit for bit, the result of a decode row
    with this token alone.

    The last dimension of out may be smaller: then V is the first numbers of K. Sums are computed
    of all of K, so that the inner loops need only one size.
    """
    start, end, length = of_row
    q = q[start:end, kv_heads[0] : kv_heads[1]]
    out = out[start:end, kv_heads[0] : kv_heads[1]]
    scale, window, soft_cap, sinks = options
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
        at = (kv_heads[0] + head // (n * group)) * group + head % group
        own = weights[head, seen[head, 0] : seen[head, 1]]
        _softmax(own, factors[head], soft_cap, sinks[at : at + 1])
    _add_values(sums, weights, cache[-1], scales[-1], *place)
    found = sums.reshape(num_kv_heads, n, group, head_dim)
    for token in range(n):
        for kv_head in range(num_kv_heads):
            for head in range(group):
                for d in range(out.shape[3]):
                    store(out[token, kv_head, head], d, found[kv_head, token, head, d])


def _made(sources):
    """Return `attend`, with a hash of its sources for numba's cache: see `written_by`."""

    @njit(parallel=True, **FAST)
    def attend(addresses, sizes, scale, window, soft_cap, parts, element, cache_element):
        """Compute attention of a batch.

        The cache is [2, num_blocks, num_kv_heads, block_size, head_dim], K before V, or [1, ...] if
        V is the first `value_dim` numbers of K. The first lines of the body show the shapes of the
        other arrays.

        The first `num_single` rows have one token each. The other rows are cut into pieces:
        (row, first token, the next piece's first token, the last token's context length).

        A quantized cache has a scale for each token and head; otherwise the address of scales is 0.
        As a scale applies to a whole head, it is multiplied into the score, or the weight. The
        address of sinks is 0 if there are none.

        Returns the number of rows with tokens or blocks that do not exist; these are skipped.
        """
        _ = sources
        num_single, num_pieces, num_tokens, num_heads, num_rows, columns = sizes[:6]
        num_stored, num_blocks, num_kv_heads, block_size, head_dim, value_dim = sizes[6:]
        q_at, out_at, starts_at, tables_at, lens_at, cache_at, scales_at, pieces_at = addresses[:8]
        sinks_at = addresses[8]
        by_token = (num_tokens, num_kv_heads, num_heads // num_kv_heads)
        q = array_at(q_at, (*by_token, head_dim), element)
        out = array_at(out_at, (*by_token, value_dim), element)
        starts = array_at(starts_at, (num_rows + 1,), np.int32(0))
        pieces = array_at(pieces_at, (num_pieces, 4), np.int32(0))
        block_tables = array_at(tables_at, (num_rows, columns), np.int32(0))
        context_lens = array_at(lens_at, (num_rows,), np.int32(0))
        shape = (num_stored, num_blocks, num_kv_heads, block_size)
        cache = array_at(cache_at, (*shape, head_dim), cache_element)
        scales = array_at(scales_at, shape, np.float32(0))
        sinks = array_at(sinks_at, (num_heads if sinks_at else 0,), np.float32(0))
        options = np.float32(scale), window, np.float32(soft_cap), sinks
        num_wrong = 0 if starts[0] == 0 and starts[num_rows] == num_tokens else 1
        # Threads share the decode rows, and then the pieces. Both run the same code, because code
        # that is compiled twice may add up in two orders.
        for is_piece in (False, True):
            count = num_pieces if is_piece else num_single
            if not count:  # a parallel loop without iterations would cost ten microseconds
                continue
            size = 1 if is_piece else num_kv_heads // parts  # KV heads per task
            for task in prange(num_kv_heads // size * count):  # a thread runs consecutive tasks
                part, row = task // count, task % count
                if is_piece:
                    row, first, end, length = pieces[row]
                else:
                    first, end, length = starts[row], starts[row + 1], context_lens[row]
                blocks, of_row = block_tables[row], (first, end, length)
                heads = part * size, (part + 1) * size
                if _exists(of_row, blocks, num_tokens, num_blocks, block_size, window):
                    _attend_row(
                        q, out, cache, scales, blocks, heads, of_row, options, cache_element
                    )
                else:
                    num_wrong += 1
        return num_wrong

    return attend


attend = _made(written_by(*SOURCES))
