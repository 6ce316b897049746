"""`TorchOps` for a CPU, compiled by numba from the Python below (extra: `nanoserve[cpu]`).

A decode step calls these a hundred times, on little data. Each torch operator costs some
microseconds before it begins, and a norm alone is six of them: here it is one loop.
"""

from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.kernels_cpu import checks
from nanoserve.kernels_cpu.values import (
    ELEMENTS,
    EXACT,
    FAST,
    address,
    array_at,
    exp,
    store,
    to_float,
)
from nanoserve.layers.ops import TorchOps

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
FEW = 2**15  # values; waking the other threads costs more than so few are worth


class NumbaOps(TorchOps):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        checks.check_norm(x, weight)
        x = x.contiguous()
        out, (size,) = torch.empty_like(x), weight.shape
        rms_norm = _rms_norm if x.numel() <= FEW else _rms_norm_parallel
        elements = ELEMENTS[x.dtype], ELEMENTS[weight.dtype]
        rms_norm(*map(address, (x, out, weight)), x.numel() // size, size, eps, *elements)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        checks.check_add_norm(x, residual, weight)
        add_rms_norm = _add_rms_norm if x.numel() <= FEW else _add_rms_norm_parallel
        elements = ELEMENTS[x.dtype], ELEMENTS[weight.dtype]
        add_rms_norm(*map(address, (x, residual, weight)), *x.shape, eps, *elements)
        return x, residual

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        checks.check_gate_up(gate_up)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r:.80} is none of {ACTIVATIONS}")
        if activation != "silu":
            return super().act_and_mul(gate_up, activation)
        num_rows, both = gate_up.shape
        out = gate_up.new_empty(num_rows, both // 2)
        silu_and_mul = _silu_and_mul if out.numel() <= FEW // 2 else _silu_and_mul_parallel
        silu_and_mul(address(gate_up), address(out), num_rows, both // 2, ELEMENTS[out.dtype])
        return out

    def norm_rotate_store(
        self,
        heads: Tensor,
        rotary: Any,
        norms: tuple[Any, Any],
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `nanoserve.layers.ops.TorchOps`."""
        checks.check_heads(heads, rotary, norms, kv_cache.shape, metadata)
        if kv_cache.dtype != heads.dtype:
            checks.refuse("heads and cache must be of one dtype", heads=heads, cache=kv_cache)
        _, num_blocks, num_kv_heads, block_size, head_dim = kv_cache.shape
        q = heads.new_empty(heads.shape[0], heads.shape[1] - 2 * num_kv_heads, head_dim)
        store_kv = _store_kv if heads.numel() <= FEW else _store_kv_parallel
        cache_shape = num_blocks, num_kv_heads, block_size
        given = tokens(heads, rotary, norms, metadata, q)
        num_wrong = store_kv(*given, address(kv_cache), cache_shape)
        checks.check_store(num_wrong, rotary, kv_cache.shape, metadata)
        return q


def tokens(
    heads: Tensor, rotary: Any, norms: tuple[Any, Any], metadata: AttentionMetadata, q: Tensor
) -> tuple[Any, ...]:
    """What `token_arrays` makes arrays of again."""
    weights = [norm.weight if norm else heads[:0] for norm in norms]
    tensors = heads, q, rotary.cos, rotary.sin, *weights, metadata.positions, metadata.slot_mapping
    sizes = *q.shape, heads.shape[1], rotary.cos.shape[0], weights[0].shape[0]
    eps = norms[0].eps if norms[0] else 0.0
    elements = ELEMENTS[heads.dtype], ELEMENTS[weights[0].dtype]
    return tuple(map(address, tensors)), sizes, eps, *elements


@njit(inline="always", **EXACT)
def token_arrays(addresses, sizes, element, weight_element):
    """(heads, q, cos, sin, q_weight, k_weight, positions, slots) of a step's tokens."""
    heads, q, cos, sin, q_weight, k_weight, positions, slots = addresses
    num_tokens, num_q_heads, head_dim, num_heads, num_positions, norm_size = sizes
    return (
        array_at(heads, (num_tokens, num_heads, head_dim), element),
        array_at(q, (num_tokens, num_q_heads, head_dim), element),
        array_at(cos, (num_positions, head_dim // 2), element),
        array_at(sin, (num_positions, head_dim // 2), element),
        array_at(q_weight, (norm_size,), weight_element),
        array_at(k_weight, (norm_size,), weight_element),
        array_at(positions, (num_tokens,), np.int32(0)),
        array_at(slots, (num_tokens,), np.int32(0)),
    )


@njit(**FAST)
def _sum_of_squares(x):
    total = np.float32(0)
    for i in range(len(x)):
        value = to_float(x[i])
        total += value * value
    return total


@njit(**EXACT)
def _scale(x, eps):
    """1 / sqrt(mean(x^2) + eps)"""
    return np.float32(1) / np.sqrt(_sum_of_squares(x) / np.float32(len(x)) + np.float32(eps))


@njit(**EXACT)
def _normalise(x, weight, eps, out):
    scale = _scale(x, eps)
    for i in range(len(x)):
        store(out, i, to_float(x[i]) * scale * to_float(weight[i]))


@njit(**EXACT)
def _rms_norm(x, out, weight, num_rows, size, eps, element, weight_element):
    x, out = array_at(x, (num_rows, size), element), array_at(out, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in range(num_rows):
        _normalise(x[row], weight, eps, out[row])


@njit(parallel=True, **EXACT)
def _rms_norm_parallel(x, out, weight, num_rows, size, eps, element, weight_element):
    x, out = array_at(x, (num_rows, size), element), array_at(out, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in prange(num_rows):
        _normalise(x[row], weight, eps, out[row])


@njit(**EXACT)
def _add_and_normalise(x, residual, weight, eps):
    for i in range(len(x)):
        store(residual, i, to_float(x[i]) + to_float(residual[i]))
    _normalise(residual, weight, eps, x)


@njit(**EXACT)
def _add_rms_norm(x, residual, weight, num_rows, size, eps, element, weight_element):
    x = array_at(x, (num_rows, size), element)
    residual = array_at(residual, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in range(num_rows):
        _add_and_normalise(x[row], residual[row], weight, eps)


@njit(parallel=True, **EXACT)
def _add_rms_norm_parallel(x, residual, weight, num_rows, size, eps, element, weight_element):
    x = array_at(x, (num_rows, size), element)
    residual = array_at(residual, (num_rows, size), element)
    weight = array_at(weight, (size,), weight_element)
    for row in prange(num_rows):
        _add_and_normalise(x[row], residual[row], weight, eps)


@njit(**EXACT)
def _silu_and_mul_row(gate_up, out):
    size = len(out)
    for i in range(size):
        gate, up = to_float(gate_up[i]), to_float(gate_up[size + i])
        magnitude = exp(-abs(gate))  # sigmoid without overflow, from either side
        sigmoid = (np.float32(1) if gate >= 0 else magnitude) / (np.float32(1) + magnitude)
        store(out, i, gate * sigmoid * up)


@njit(**EXACT)
def _silu_and_mul(gate_up, out, num_rows, size, element):
    gate_up = array_at(gate_up, (num_rows, 2 * size), element)
    out = array_at(out, (num_rows, size), element)
    for row in range(num_rows):
        _silu_and_mul_row(gate_up[row], out[row])


@njit(parallel=True, **EXACT)
def _silu_and_mul_parallel(gate_up, out, num_rows, size, element):
    gate_up = array_at(gate_up, (num_rows, 2 * size), element)
    out = array_at(out, (num_rows, size), element)
    for row in prange(num_rows):
        _silu_and_mul_row(gate_up[row], out[row])


@njit(**EXACT)
def _store_kv(addresses, sizes, eps, element, weight_element, kv_cache, cache_shape):
    """One token after the other; see `nanoserve.kernels.store_kv` for the shapes.

    Returns how many tokens have a position or a slot that does not exist; those are left out.
    """
    arrays = token_arrays(addresses, sizes, element, weight_element)
    kv_cache = array_at(kv_cache, (2, *cache_shape, sizes[2]), element)
    num_wrong = 0
    for token in range(sizes[0]):
        num_wrong += _store_token(token, arrays, eps, kv_cache)
    return num_wrong


@njit(parallel=True, **EXACT)
def _store_kv_parallel(addresses, sizes, eps, element, weight_element, kv_cache, cache_shape):
    arrays = token_arrays(addresses, sizes, element, weight_element)
    kv_cache = array_at(kv_cache, (2, *cache_shape, sizes[2]), element)
    num_wrong = 0
    for token in prange(sizes[0]):
        num_wrong += _store_token(token, arrays, eps, kv_cache)
    return num_wrong


@njit(**EXACT)
def _store_token(token, arrays, eps, kv_cache):
    all_heads, all_q, all_cos, all_sin, q_weight, k_weight, positions, slots = arrays
    heads, q, slot, position = all_heads[token], all_q[token], slots[token], positions[token]
    num_blocks, num_kv_heads, block_size = kv_cache.shape[1:4]
    if not (0 <= slot < num_blocks * block_size and 0 <= position < len(all_cos)):
        return 1
    cos, sin = all_cos[position], all_sin[position]
    num_heads, head_dim = q.shape
    block, offset = slot // block_size, slot % block_size
    for head in range(num_heads):
        norm_and_turn(heads[head], q_weight, eps, cos, sin, q[head])
    for head in range(num_kv_heads):
        k, v = kv_cache[0, block, head, offset], kv_cache[1, block, head, offset]
        norm_and_turn(heads[num_heads + head], k_weight, eps, cos, sin, k)
        source = heads[num_heads + num_kv_heads + head]
        for i in range(head_dim):
            v[i] = source[i]
    return 0


@njit(**EXACT)
def norm_and_turn(x, weight, eps, cos, sin, out):
    half = len(x) // 2
    if len(weight):
        scale = _scale(x, eps)
        for i in range(half):
            first = to_float(x[i]) * scale * to_float(weight[i])
            second = to_float(x[half + i]) * scale * to_float(weight[half + i])
            c, s = to_float(cos[i]), to_float(sin[i])
            store(out, i, first * c - second * s)
            store(out, half + i, second * c + first * s)
    else:
        for i in range(half):
            first, second = to_float(x[i]), to_float(x[half + i])
            c, s = to_float(cos[i]), to_float(sin[i])
            store(out, i, first * c - second * s)
            store(out, half + i, second * c + first * s)
