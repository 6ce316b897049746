"""Storing K and V in 8 bits, compiled by numba; see `nanoserve.attention.quantized_kv`."""

from typing import Any

import numpy as np
from numba import njit, prange
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.quantized_kv import (
    LARGEST_CODE,
    SMALLEST_SCALE,
    QuantizedKV,
    codes_and_scales,
)
from nanoserve.kernels_cpu import checks
from nanoserve.kernels_cpu.ops import FEW, NumbaOps, norm_and_turn, token_arrays, tokens
from nanoserve.kernels_cpu.values import ELEMENTS, EXACT, address, array_at, store, to_float


class QuantizedNumbaOps(NumbaOps):
    def norm_rotate_store(
        self,
        heads: Tensor,
        rotary: Any,
        norms: tuple[Any, Any],
        kv_cache: QuantizedKV,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """See `nanoserve.layers.ops.TorchOps`. K goes from float32 to codes, with no rounding to
        16 bits between."""
        codes_and_scales(kv_cache, heads.dtype)
        checks.check_heads(heads, rotary, norms, kv_cache.codes.shape, metadata)
        _, num_blocks, num_kv_heads, block_size, head_dim = kv_cache.codes.shape
        q = heads.new_empty(heads.shape[0], heads.shape[1] - 2 * num_kv_heads, head_dim)
        store_kv = _store_kv if heads.numel() <= FEW // 2 else _store_kv_parallel
        num_wrong = store_kv(
            *tokens(heads, rotary, norms, metadata, q),
            tuple(map(address, kv_cache)),
            (num_blocks, num_kv_heads, block_size),
            LARGEST_CODE[kv_cache.codes.dtype],
            ELEMENTS[kv_cache.codes.dtype],
        )
        checks.check_store(num_wrong, rotary, kv_cache.codes.shape, metadata)
        return q


@njit(**EXACT)
def _store_kv(addresses, sizes, eps, element, weight_element, cache, shape, largest_code, code):
    """Store codes, as `nanoserve.kernels_cpu.ops._store_kv` stores floats."""
    arrays = token_arrays(addresses, sizes, element, weight_element)
    codes = array_at(cache[0], (2, *shape, sizes[2]), code)
    scales = array_at(cache[1], (2, *shape), np.float32(0))
    num_wrong = 0
    for token in range(sizes[0]):
        num_wrong += _store_token(token, arrays, eps, codes, scales, np.float32(largest_code))
    return num_wrong


@njit(parallel=True, **EXACT)
def _store_kv_parallel(
    addresses, sizes, eps, element, weight_element, cache, shape, largest_code, code
):
    arrays = token_arrays(addresses, sizes, element, weight_element)
    codes = array_at(cache[0], (2, *shape, sizes[2]), code)
    scales = array_at(cache[1], (2, *shape), np.float32(0))
    num_wrong = 0
    for token in prange(sizes[0]):
        num_wrong += _store_token(token, arrays, eps, codes, scales, np.float32(largest_code))
    return num_wrong


@njit(**EXACT)
def _store_token(token, arrays, eps, codes, scales, largest_code):
    all_heads, all_q, all_cos, all_sin, q_weight, k_weight, positions, slots = arrays
    heads, q, slot, position = all_heads[token], all_q[token], slots[token], positions[token]
    num_blocks, num_kv_heads, block_size = codes.shape[1:4]
    if not (0 <= slot < num_blocks * block_size and 0 <= position < len(all_cos)):
        return 1
    c, s = all_cos[position], all_sin[position]
    num_heads, head_dim = q.shape
    block, offset = slot // block_size, slot % block_size
    values = np.empty(head_dim, dtype=np.float32)
    for head in range(num_heads):
        norm_and_turn(heads[head], q_weight, eps, c, s, q[head])
    for head in range(num_kv_heads):
        k, v = heads[num_heads + head], heads[num_heads + num_kv_heads + head]
        norm_and_turn(k, k_weight, eps, c, s, values)
        k_codes, v_codes = codes[0, block, head, offset], codes[1, block, head, offset]
        scales[0, block, head, offset] = quantize_head(values, largest_code, k_codes)
        for i in range(head_dim):
            values[i] = to_float(v[i])
        scales[1, block, head, offset] = quantize_head(values, largest_code, v_codes)
    return 0


@njit(**EXACT)
def quantize_head(values, largest_code, codes):
    """`quantize` of a head, bit for bit; returns its scale."""
    bits = values.view(np.int32)
    largest = np.int32(0)
    for i in range(len(bits)):  # magnitudes are in the order of their bits, infinity, then NaN last
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    is_finite = largest < np.int32(0x7F800000)
    scale = max(np.int32(largest).view(np.float32) / largest_code, np.float32(SMALLEST_SCALE))
    for i in range(len(values)):
        store(codes, i, values[i] / scale if is_finite else np.float32(0))
    return scale if is_finite else np.float32(np.nan)
