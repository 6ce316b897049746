"""Decode attention on a CPU, compiled by numba from the Python below (extra: `nanoserve[cpu]`).

A decode row reads the K and V of its whole context to compute a single token, so what counts is
that every value is read once, in order, and nothing is written in between. torch has no operator
that reads a paged cache: it must gather the blocks into a copy first. Here each task is one row and
one KV head: it walks over the row's blocks where they lie, for two of the head's queries at once.
"""

import math

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.torch import TorchAttention
from nanoserve.kernels.numba_values import FAST, as_numpy, exp, store, to_float


class NumbaAttention(TorchAttention):
    """`TorchAttention` for rows of several tokens, a kernel of its own for rows of one."""

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        out = torch.empty_like(q)
        rows = metadata.num_decode_rows
        if rows:
            k_cache, v_cache = as_numpy(kv_cache)
            _decode(
                as_numpy(q[:rows]),
                k_cache,
                v_cache,
                metadata.block_tables.numpy(),
                metadata.context_lens.numpy(),
                np.float32(layer.scale),
                layer.sliding_window or 2**31 - 1,
                np.float32(layer.soft_cap or 0.0),
                as_numpy(out[:rows]),
            )
        if rows < metadata.num_rows:
            self._attend_chunks(layer, q, kv_cache, metadata, out)
        return out


@njit(parallel=True, **FAST)
def _decode(q, k_cache, v_cache, block_tables, context_lens, scale, window, soft_cap, out):
    """q, out: [num_rows, num_heads, head_dim]; for the caches see `AttentionBackend`."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    # Neighbouring tasks go to one thread. With the head first, all threads get a share of each row.
    for task in prange(num_kv_heads * num_rows):
        kv_head, row = task // num_rows, task % num_rows
        length = context_lens[row]
        first = max(0, length - window)
        queries = np.empty((2, head_dim), dtype=np.float32)
        sums = np.empty((2, head_dim), dtype=np.float32)
        scores = np.empty((2, length), dtype=np.float32)
        for head in range(kv_head * group, (kv_head + 1) * group, 2):
            # The last query of an odd group is computed twice.
            last = min(head + 1, (kv_head + 1) * group - 1)
            for d in range(head_dim):
                queries[0, d] = to_float(q[row, head, d]) * scale
                queries[1, d] = to_float(q[row, last, d]) * scale
            blocks = block_tables[row]
            _all_scores(queries, k_cache, blocks, kv_head, first, length, scores)
            for i in range(2):
                if soft_cap > 0:
                    for t in range(first, length):
                        scores[i, t] = soft_cap * math.tanh(scores[i, t] / soft_cap)
                _softmax(scores[i, first:length])
            sums[:] = 0
            _weighted_sums(scores, v_cache, blocks, kv_head, first, length, sums)
            for d in range(head_dim):
                store(out, (row, head, d), sums[0, d])
                store(out, (row, last, d), sums[1, d])


@njit(**FAST)
def _all_scores(queries, k_cache, blocks, kv_head, first, length, scores):
    block_size = k_cache.shape[2]
    for i in range(first // block_size, (length + block_size - 1) // block_size):
        k = k_cache[blocks[i], kv_head]
        start = i * block_size
        t, end = max(first - start, 0), min(length - start, block_size)
        while t + 4 <= end:
            _dot_4(queries[0], queries[1], k[t], k[t + 1], k[t + 2], k[t + 3], scores, start + t)
            t += 4
        while t < end:
            a = b = np.float32(0)
            for d in range(k.shape[1]):
                x = to_float(k[t, d])
                a += queries[0, d] * x
                b += queries[1, d] * x
            scores[0, start + t], scores[1, start + t] = a, b
            t += 1


@njit(**FAST)
def _dot_4(q0, q1, k0, k1, k2, k3, scores, t):
    """Two queries and four keys: eight sums, enough to hide the latency of a multiply-add."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for d in range(q0.shape[0]):
        x0, x1, x2, x3 = to_float(k0[d]), to_float(k1[d]), to_float(k2[d]), to_float(k3[d])
        a0 += q0[d] * x0
        a1 += q0[d] * x1
        a2 += q0[d] * x2
        a3 += q0[d] * x3
        b0 += q1[d] * x0
        b1 += q1[d] * x1
        b2 += q1[d] * x2
        b3 += q1[d] * x3
    scores[0, t], scores[0, t + 1], scores[0, t + 2], scores[0, t + 3] = a0, a1, a2, a3
    scores[1, t], scores[1, t + 1], scores[1, t + 2], scores[1, t + 3] = b0, b1, b2, b3


@njit(**FAST)
def _weighted_sums(weights, v_cache, blocks, kv_head, first, length, sums):
    block_size = v_cache.shape[2]
    for i in range(first // block_size, (length + block_size - 1) // block_size):
        v = v_cache[blocks[i], kv_head]
        start = i * block_size
        t, end = max(first - start, 0), min(length - start, block_size)
        while t + 4 <= end:
            _add_4(sums[0], sums[1], v[t], v[t + 1], v[t + 2], v[t + 3], weights, start + t)
            t += 4
        while t < end:
            a, b = weights[0, start + t], weights[1, start + t]
            for d in range(v.shape[1]):
                x = to_float(v[t, d])
                sums[0, d] += a * x
                sums[1, d] += b * x
            t += 1


@njit(**FAST)
def _add_4(sum0, sum1, v0, v1, v2, v3, weights, t):
    a0, a1, a2, a3 = weights[0, t], weights[0, t + 1], weights[0, t + 2], weights[0, t + 3]
    b0, b1, b2, b3 = weights[1, t], weights[1, t + 1], weights[1, t + 2], weights[1, t + 3]
    for d in range(sum0.shape[0]):
        x0, x1, x2, x3 = to_float(v0[d]), to_float(v1[d]), to_float(v2[d]), to_float(v3[d])
        sum0[d] += (a0 * x0 + a1 * x1) + (a2 * x2 + a3 * x3)
        sum1[d] += (b0 * x0 + b1 * x1) + (b2 * x2 + b3 * x3)


@njit(**FAST)
def _softmax(scores):
    largest = scores[0]
    for t in range(len(scores)):
        largest = max(largest, scores[t])
    total = np.float32(0)
    for t in range(len(scores)):
        scores[t] = exp(scores[t] - largest)
        total += scores[t]
    for t in range(len(scores)):
        scores[t] /= total
