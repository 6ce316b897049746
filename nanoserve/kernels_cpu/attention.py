"""Decode attention, compiled by numba from the Python below (extra: `nanoserve[cpu]`).

A decode row reads the K and V of its whole context to compute a single token, so what counts is
that every value is read once, in order, and that nothing is written in between. torch has no
operator that reads a paged cache: it must gather the blocks into a copy first. Here a task is a row
and a range of KV heads. It walks over the row's blocks where they lie; the heads of a block are
neighbours in memory, so a block is one long run. The processor fetches ahead within a page of
memory only, so a task also asks for the next head's K or V while it computes with this one's.
"""

import math

import numpy as np
from numba import njit, prange

from nanoserve.kernels_cpu.values import FAST, array_at, exp, prefetch, store, to_float


@njit(parallel=True, **FAST)
def attend_decode(addresses, sizes, scale, window, soft_cap, parts, element, cache_element):
    """For the cache see `AttentionBackend`; what has which shape is said at the top.

    A cache of codes has scales, see `nanoserve.attention.quantized_kv`; the address of others' is
    0. A scale is that of a whole head, so it is multiplied into the head's score, or its weight:
    the inner loops are those of any other cache.
    """
    num_rows, num_heads, columns, num_blocks, num_kv_heads, block_size, head_dim = sizes
    q_at, out_at, tables_at, lens_at, cache_at, scales_at = addresses
    q = array_at(q_at, (num_rows, num_heads, head_dim), element)
    out = array_at(out_at, (num_rows, num_heads, head_dim), element)
    block_tables = array_at(tables_at, (num_rows, columns), np.int32(0))
    context_lens = array_at(lens_at, (num_rows,), np.int32(0))
    shape = (2, num_blocks, num_kv_heads, block_size)
    cache = array_at(cache_at, (*shape, head_dim), cache_element)
    scales = array_at(scales_at, shape, np.float32(0))
    k_cache, v_cache, k_scales, v_scales = cache[0], cache[1], scales[0], scales[1]
    scale, soft_cap = np.float32(scale), np.float32(soft_cap)
    heads_here, kv_heads_here = num_heads // parts, num_kv_heads // parts
    for task in prange(parts * num_rows):  # neighbours go to one thread
        part, row = task // num_rows, task % num_rows
        first_head, first_kv_head = part * heads_here, part * kv_heads_here
        length = context_lens[row]
        first = max(0, length - window)
        queries = np.empty((heads_here, head_dim), dtype=np.float32)
        for head in range(heads_here):
            for d in range(head_dim):
                queries[head, d] = to_float(q[row, first_head + head, d]) * scale
        weights = np.empty((heads_here, length), dtype=np.float32)
        sums = np.zeros((heads_here, head_dim), dtype=np.float32)
        kv_heads = (first_kv_head, first_kv_head + kv_heads_here)
        _add_scores(queries, k_cache, block_tables[row], kv_heads, first, length, weights)
        if scales_at:
            _multiply(weights, k_scales, block_tables[row], kv_heads, first, length)
        for head in range(heads_here):
            _softmax(weights[head, first:], soft_cap)
        if scales_at:
            _multiply(weights, v_scales, block_tables[row], kv_heads, first, length)
        _add_values(weights, v_cache, block_tables[row], kv_heads, first, length, sums)
        for head in range(heads_here):
            for d in range(head_dim):
                store(out[row, first_head + head], d, sums[head, d])


@njit(**FAST)
def _add_scores(queries, k_cache, blocks, kv_heads, first, length, scores):
    """scores[head, t] = queries[head] . k of token t, for t in [first, length)"""
    block_size, group = k_cache.shape[2], len(queries) // (kv_heads[1] - kv_heads[0])
    for i in range(first // block_size, (length + block_size - 1) // block_size):
        start = i * block_size
        low, high = max(first - start, 0), min(length - start, block_size)
        for kv_head in range(kv_heads[0], kv_heads[1]):
            k = k_cache[blocks[i], kv_head]
            following = _following(k_cache, blocks, i, kv_head, kv_heads, length)
            head, end = (kv_head - kv_heads[0]) * group, (kv_head - kv_heads[0] + 1) * group
            while head + 2 <= end:
                t = low
                while t + 4 <= high:
                    prefetch(following[t : t + 4])
                    _dot_2x4(queries, head, k, t, scores, start + t)
                    t += 4
                while t < high:
                    scores[head, start + t] = _dot(queries[head], k[t])
                    scores[head + 1, start + t] = _dot(queries[head + 1], k[t])
                    t += 1
                head += 2
            if head < end:
                for t in range(low, high):
                    scores[head, start + t] = _dot(queries[head], k[t])


@njit(**FAST)
def _multiply(weights, scales, blocks, kv_heads, first, length):
    """weights[head, t] *= the scale of token t in its KV head, for t in [first, length)"""
    block_size, group = scales.shape[2], len(weights) // (kv_heads[1] - kv_heads[0])
    for i in range(first // block_size, (length + block_size - 1) // block_size):
        start = i * block_size
        low, high = max(first - start, 0), min(length - start, block_size)
        for kv_head in range(kv_heads[0], kv_heads[1]):
            scale = scales[blocks[i], kv_head]
            for head in range((kv_head - kv_heads[0]) * group, (kv_head - kv_heads[0] + 1) * group):
                weight = weights[head]
                for t in range(low, high):
                    weight[start + t] *= scale[t]


@njit(**FAST)
def _following(cache, blocks, i, kv_head, kv_heads, length):
    """[block_size, head_dim]: what is read after `kv_head` of block i."""
    if kv_head + 1 < kv_heads[1]:
        return cache[blocks[i], kv_head + 1]
    block_size = cache.shape[2]
    return cache[blocks[min(i + 1, (length - 1) // block_size)], kv_heads[0]]


@njit(**FAST)
def _dot_2x4(queries, head, k, t, scores, at):
    """Two queries and four keys: eight sums, enough to hide the latency of a multiply-add."""
    q0, q1 = queries[head], queries[head + 1]
    k0, k1, k2, k3 = k[t], k[t + 1], k[t + 2], k[t + 3]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for d in range(len(q0)):
        x0, x1, x2, x3 = to_float(k0[d]), to_float(k1[d]), to_float(k2[d]), to_float(k3[d])
        a0 += q0[d] * x0
        a1 += q0[d] * x1
        a2 += q0[d] * x2
        a3 += q0[d] * x3
        b0 += q1[d] * x0
        b1 += q1[d] * x1
        b2 += q1[d] * x2
        b3 += q1[d] * x3
    row0, row1 = scores[head], scores[head + 1]
    row0[at], row0[at + 1], row0[at + 2], row0[at + 3] = a0, a1, a2, a3
    row1[at], row1[at + 1], row1[at + 2], row1[at + 3] = b0, b1, b2, b3


@njit(**FAST)
def _dot(query, k):
    total = np.float32(0)
    for d in range(len(query)):
        total += query[d] * to_float(k[d])
    return total


@njit(**FAST)
def _add_values(weights, v_cache, blocks, kv_heads, first, length, sums):
    """sums[head] += weights[head, t] * v of token t, for t in [first, length)"""
    block_size, group = v_cache.shape[2], len(weights) // (kv_heads[1] - kv_heads[0])
    for i in range(first // block_size, (length + block_size - 1) // block_size):
        start = i * block_size
        low, high = max(first - start, 0), min(length - start, block_size)
        for kv_head in range(kv_heads[0], kv_heads[1]):
            v = v_cache[blocks[i], kv_head]
            following = _following(v_cache, blocks, i, kv_head, kv_heads, length)
            head, end = (kv_head - kv_heads[0]) * group, (kv_head - kv_heads[0] + 1) * group
            while head + 2 <= end:
                t = low
                while t + 4 <= high:
                    prefetch(following[t : t + 4])
                    _add_2x4(weights, head, v, t, sums, start + t)
                    t += 4
                while t < high:
                    _add(weights[head, start + t], v[t], sums[head])
                    _add(weights[head + 1, start + t], v[t], sums[head + 1])
                    t += 1
                head += 2
            if head < end:
                for t in range(low, high):
                    _add(weights[head, start + t], v[t], sums[head])


@njit(**FAST)
def _add_2x4(weights, head, v, t, sums, at):
    w0, w1, sum0, sum1 = weights[head], weights[head + 1], sums[head], sums[head + 1]
    v0, v1, v2, v3 = v[t], v[t + 1], v[t + 2], v[t + 3]
    a0, a1, a2, a3 = w0[at], w0[at + 1], w0[at + 2], w0[at + 3]
    b0, b1, b2, b3 = w1[at], w1[at + 1], w1[at + 2], w1[at + 3]
    for d in range(len(sum0)):
        x0, x1, x2, x3 = to_float(v0[d]), to_float(v1[d]), to_float(v2[d]), to_float(v3[d])
        sum0[d] += (a0 * x0 + a1 * x1) + (a2 * x2 + a3 * x3)
        sum1[d] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)


@njit(**FAST)
def _add(weight, v, sums):
    for d in range(len(sums)):
        sums[d] += weight * to_float(v[d])


@njit(**FAST)
def _softmax(scores, soft_cap):
    if soft_cap > 0:
        for t in range(len(scores)):
            scores[t] = soft_cap * math.tanh(scores[t] / soft_cap)
    largest = scores[0]
    for t in range(len(scores)):
        largest = max(largest, scores[t])
    total = np.float32(0)
    for t in range(len(scores)):
        scores[t] = exp(scores[t] - largest)
        total += scores[t]
    for t in range(len(scores)):
        scores[t] /= total
