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
from nanoserve.kernels_cpu.values import FAST, as_numpy, exp, store, to_float
from nanoserve.layers.ops import TorchOps

FEW = 2**15  # values; waking the other threads costs more than so few are worth


class NumbaOps(TorchOps):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), len(weight)
        rows = (as_numpy(tensor.view(-1, size)) for tensor in (x, out))
        rms_norm = _rms_norm if x.numel() <= FEW else _rms_norm_parallel
        rms_norm(*rows, as_numpy(weight), np.float32(eps))
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        add_rms_norm = _add_rms_norm if x.numel() <= FEW else _add_rms_norm_parallel
        add_rms_norm(as_numpy(x), as_numpy(residual), as_numpy(weight), np.float32(eps))
        return x, residual

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation != "silu":
            return super().act_and_mul(gate_up, activation)
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        silu_and_mul = _silu_and_mul if out.numel() <= FEW // 2 else _silu_and_mul_parallel
        silu_and_mul(as_numpy(gate_up), as_numpy(out))
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
        num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
        q = heads.new_empty(len(heads), heads.shape[1] - 2 * num_kv_heads, head_dim)
        weights = (norm.weight if norm else heads.new_empty(0) for norm in norms)
        store_kv = _store_kv if heads.numel() <= FEW else _store_kv_parallel
        store_kv(
            as_numpy(heads),
            metadata.positions.numpy(),
            as_numpy(rotary.cos),
            as_numpy(rotary.sin),
            *map(as_numpy, weights),
            np.float32(norms[0].eps if norms[0] else 0.0),
            as_numpy(kv_cache),
            metadata.slot_mapping.numpy(),
            as_numpy(q),
        )
        return q


@njit(**FAST)
def _scale(x, eps):
    """1 / sqrt(mean(x^2) + eps)"""
    total = np.float32(0)
    for i in range(len(x)):
        value = to_float(x[i])
        total += value * value
    return np.float32(1) / np.sqrt(total / np.float32(len(x)) + eps)


@njit(**FAST)
def _normalise(x, weight, eps, out):
    scale = _scale(x, eps)
    for i in range(len(x)):
        store(out, i, to_float(x[i]) * scale * to_float(weight[i]))


@njit(**FAST)
def _rms_norm(x, out, weight, eps):
    for row in range(len(x)):
        _normalise(x[row], weight, eps, out[row])


@njit(parallel=True, **FAST)
def _rms_norm_parallel(x, out, weight, eps):
    for row in prange(len(x)):
        _normalise(x[row], weight, eps, out[row])


@njit(**FAST)
def _add_and_normalise(x, residual, weight, eps):
    for i in range(len(x)):
        store(residual, i, to_float(x[i]) + to_float(residual[i]))
    _normalise(residual, weight, eps, x)


@njit(**FAST)
def _add_rms_norm(x, residual, weight, eps):
    for row in range(len(x)):
        _add_and_normalise(x[row], residual[row], weight, eps)


@njit(parallel=True, **FAST)
def _add_rms_norm_parallel(x, residual, weight, eps):
    for row in prange(len(x)):
        _add_and_normalise(x[row], residual[row], weight, eps)


@njit(**FAST)
def _silu_and_mul_row(gate_up, out):
    size = len(out)
    for i in range(size):
        gate, up = to_float(gate_up[i]), to_float(gate_up[size + i])
        magnitude = exp(-abs(gate))  # sigmoid without overflow, from either side
        sigmoid = (np.float32(1) if gate >= 0 else magnitude) / (np.float32(1) + magnitude)
        store(out, i, gate * sigmoid * up)


@njit(**FAST)
def _silu_and_mul(gate_up, out):
    for row in range(len(out)):
        _silu_and_mul_row(gate_up[row], out[row])


@njit(parallel=True, **FAST)
def _silu_and_mul_parallel(gate_up, out):
    for row in prange(len(out)):
        _silu_and_mul_row(gate_up[row], out[row])


@njit(**FAST)
def _store_kv(heads, positions, cos, sin, q_weight, k_weight, eps, kv_cache, slots, q):
    """One token after the other; see `nanoserve.kernels.store_kv` for the shapes."""
    for token in range(len(heads)):
        c, s = cos[positions[token]], sin[positions[token]]
        _store_token(heads[token], q_weight, k_weight, eps, c, s, kv_cache, slots[token], q[token])


@njit(parallel=True, **FAST)
def _store_kv_parallel(heads, positions, cos, sin, q_weight, k_weight, eps, kv_cache, slots, q):
    for token in prange(len(heads)):
        c, s = cos[positions[token]], sin[positions[token]]
        _store_token(heads[token], q_weight, k_weight, eps, c, s, kv_cache, slots[token], q[token])


@njit(**FAST)
def _store_token(heads, q_weight, k_weight, eps, cos, sin, kv_cache, slot, q):
    num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    block, offset = slot // block_size, slot % block_size
    for head in range(num_heads):
        norm_and_turn(heads[head], q_weight, eps, cos, sin, q[head])
    for head in range(num_kv_heads):
        k, v = kv_cache[0, block, head, offset], kv_cache[1, block, head, offset]
        norm_and_turn(heads[num_heads + head], k_weight, eps, cos, sin, k)
        source = heads[num_heads + num_kv_heads + head]
        for i in range(head_dim):
            v[i] = source[i]


@njit(**FAST)
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
