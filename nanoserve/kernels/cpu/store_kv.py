"""The fused kernel between the qkv projection and attention on a CPU, compiled by numba.

Query and key heads are normalised, if the model does that, and rotated (RoPE); keys and values are
written to their KV slots in the paged cache, as floats or as 8-bit codes. Each value is read once
and written once.
"""

import numpy as np
import torch
from numba import njit, prange, types
from numba.extending import overload
from torch import Tensor

from nanoserve.kernels.cpu import checks
from nanoserve.kernels.cpu.elements import (
    ELEMENTS,
    EXACT,
    address,
    array_at,
    store,
    to_float,
)
from nanoserve.kernels.cpu.ops import FEW, scale_of

LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 448.0}  # uint8: the bits of e4m3
_SMALLEST_SCALE = np.finfo(np.float32).tiny


@njit(**EXACT)
def quantize_head(values, largest_code, codes):
    """Write the codes of a head's float32 values; return the scale, NaN if any is not finite."""
    bits = values.view(np.int32)
    largest = np.int32(0)
    for i in range(len(bits)):  # magnitudes have the order of their bits; infinity, then NaN last
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    is_finite = largest < np.int32(0x7F800000)
    scale = max(np.int32(largest).view(np.float32) / largest_code, _SMALLEST_SCALE)
    for i in range(len(values)):
        store(codes, i, values[i] / scale if is_finite else np.float32(0))
    return scale if is_finite else np.float32(np.nan)


def store_kv(
    heads: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Store K and V in `kv_cache`; return q [num_tokens, num_heads, head_dim].

    heads: [num_tokens, num_heads + 2 x num_kv_heads, head_dim]: the heads of q, then k, then v.
    positions, slot_mapping: int32 [num_tokens]; KV slot = block * block_size + offset.
    cos, sin: [num_positions, head_dim / 2].
    q_weight, k_weight: [head_dim], the RMSNorm of every query and key head, or both None.
    kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], in the dtype of `heads`; or
    codes, int8 or uint8 (e4m3), quantized from float32.
    kv_scales: scales of the codes, float32 [2, num_blocks, num_kv_heads, block_size].
    All are contiguous. Raises `ValueError` for shapes and dtypes that do not match, and for
    positions and KV slots that do not exist, after the other tokens have been stored.
    """
    shape = kv_cache.shape
    checks.check_cache(kv_cache, kv_scales, heads.dtype)
    checks.check_heads(heads, positions, cos, sin, q_weight, k_weight, shape, slot_mapping)
    num_tokens, num_heads, head_dim = heads.shape
    q = heads.new_empty(num_tokens, num_heads - 2 * shape[2], head_dim)
    few, scales_at, largest_code = FEW, 0, 0.0
    if kv_scales is not None:
        few, scales_at, largest_code = FEW // 2, address(kv_scales), LARGEST_CODE[kv_cache.dtype]
    if q_weight is None or k_weight is None:  # both are
        q_weight = k_weight = heads[:0]
    tensors = heads, q, cos, sin, q_weight, k_weight, positions, slot_mapping, kv_cache
    store_tokens = _store_tokens if heads.numel() <= few else _store_tokens_parallel
    num_wrong = store_tokens(
        (*map(address, tensors), scales_at),
        (*q.shape, num_heads, cos.shape[0], q_weight.shape[0], *shape[1:4]),
        eps,
        largest_code,
        (ELEMENTS[heads.dtype], ELEMENTS[q_weight.dtype], ELEMENTS[kv_cache.dtype]),
    )
    if num_wrong:
        checks.refuse_places(positions, cos.shape[0], slot_mapping, shape[1] * shape[3])
    return q


@njit(**EXACT)
def _store_tokens(addresses, sizes, eps, largest_code, elements):
    """Store the tokens in a serial loop.

    Returns the number of tokens whose position or KV slot does not exist; these are skipped.
    """
    arrays = _arrays(addresses, sizes, elements)
    num_wrong = 0
    for token in range(sizes[0]):
        num_wrong += _store_token(token, arrays, eps, np.float32(largest_code))
    return num_wrong


@njit(parallel=True, **EXACT)
def _store_tokens_parallel(addresses, sizes, eps, largest_code, elements):
    arrays = _arrays(addresses, sizes, elements)
    num_wrong = 0
    for token in prange(sizes[0]):
        num_wrong += _store_token(token, arrays, eps, np.float32(largest_code))
    return num_wrong


@njit(inline="always", **EXACT)
def _arrays(addresses, sizes, elements):
    """Return (heads, q, cos, sin, q_weight, k_weight, positions, slots, cache, scales)."""
    heads, q, cos, sin, q_weight, k_weight, positions, slots, cache, scales = addresses
    num_tokens, num_q_heads, head_dim, num_heads, num_positions, norm_size = sizes[:6]
    num_blocks, num_kv_heads, block_size = sizes[6:]
    element, weight_element, cache_element = elements
    slots_shape = (2, num_blocks, num_kv_heads, block_size)
    return (
        array_at(heads, (num_tokens, num_heads, head_dim), element),
        array_at(q, (num_tokens, num_q_heads, head_dim), element),
        array_at(cos, (num_positions, head_dim // 2), element),
        array_at(sin, (num_positions, head_dim // 2), element),
        array_at(q_weight, (norm_size,), weight_element),
        array_at(k_weight, (norm_size,), weight_element),
        array_at(positions, (num_tokens,), np.int32(0)),
        array_at(slots, (num_tokens,), np.int32(0)),
        array_at(cache, (*slots_shape, head_dim), cache_element),
        array_at(scales, slots_shape, np.float32(0)),
    )


@njit(**EXACT)
def _store_token(token, arrays, eps, largest_code):
    all_heads, all_q, all_cos, all_sin, q_weight, k_weight, positions, slots, cache, scales = arrays
    heads, q, slot, position = all_heads[token], all_q[token], slots[token], positions[token]
    num_blocks, num_kv_heads, block_size = cache.shape[1:4]
    if not (0 <= slot < num_blocks * block_size and 0 <= position < len(all_cos)):
        return 1
    cos, sin = all_cos[position], all_sin[position]
    num_heads = len(q)
    for head in range(num_heads):
        _norm_and_turn(heads[head], q_weight, eps, cos, sin, q[head])
    k, v = heads[num_heads : num_heads + num_kv_heads], heads[num_heads + num_kv_heads :]
    turn = k_weight, eps, cos, sin
    _keep(k, v, turn, cache, scales, slot // block_size, slot % block_size, largest_code)
    return 0


def _keep(k, v, turn, cache, scales, block, offset, largest_code):
    """Store a token's K, normalised and rotated, and V, both [num_kv_heads, head_dim]."""


@overload(_keep)
def _keep_floats_or_codes(k, v, turn, cache, scales, block, offset, largest_code):
    if cache.dtype not in (types.int8, types.uint8):

        def floats(k, v, turn, cache, scales, block, offset, largest_code):
            k_weight, eps, cos, sin = turn
            for head in range(len(k)):
                _norm_and_turn(k[head], k_weight, eps, cos, sin, cache[0, block, head, offset])
                source, target = v[head], cache[1, block, head, offset]
                for i in range(len(source)):
                    target[i] = source[i]

        return floats

    def codes(k, v, turn, cache, scales, block, offset, largest_code):
        k_weight, eps, cos, sin = turn
        values = np.empty(k.shape[1], dtype=np.float32)
        for head in range(len(k)):
            k_codes, v_codes = cache[0, block, head, offset], cache[1, block, head, offset]
            _norm_and_turn(k[head], k_weight, eps, cos, sin, values)
            scales[0, block, head, offset] = quantize_head(values, largest_code, k_codes)
            source = v[head]
            for i in range(len(source)):
                values[i] = to_float(source[i])
            scales[1, block, head, offset] = quantize_head(values, largest_code, v_codes)

    return codes


@njit(**EXACT)
def _norm_and_turn(x, weight, eps, cos, sin, out):
    half = len(x) // 2
    if len(weight):
        scale = scale_of(x, eps)
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
