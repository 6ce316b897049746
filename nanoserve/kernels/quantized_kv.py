"""K and V in 8 bits, for the Triton kernels: to codes and scales, and back.

A value is its code x the scale of its token and head, float32; the largest magnitude of a head has
the largest code, 127 of int8 or 448 of e4m3. Bytes of the type uint8 are e4m3, and are put together
bit by bit: Triton's own type for it needs a GPU of compute capability 8.9 or newer.
"""

import torch
import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)  # the bits of magnitudes that are not finite start here
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
# Added to a number below 2^22, it leaves no room for a fraction: it rounds, halves to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)


def check_cache(kv_cache: torch.Tensor, kv_scales: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Raise `ValueError` unless floats are of `dtype`, and codes contiguous, each with its scale.

    kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim]; kv_scales: float32, without
    head_dim, or None of floats.
    """
    if kv_scales is None:
        if kv_cache.dtype != dtype:
            raise ValueError(f"kv_cache {kv_cache.dtype} of values in {dtype} is not supported")
        return
    is_good = kv_cache.dtype in (torch.int8, torch.uint8) and kv_scales.dtype == torch.float32
    if not is_good or kv_scales.shape != kv_cache.shape[:-1]:
        raise ValueError(
            f"codes {kv_cache.dtype} {list(kv_cache.shape)} must be int8 or uint8, and scales "
            f"{kv_scales.dtype} {list(kv_scales.shape)} float32, one for each head of each slot"
        )
    if not (kv_cache.is_contiguous() and kv_scales.is_contiguous()):
        raise ValueError(
            f"codes and scales must be contiguous: {kv_cache.stride()}, {kv_scales.stride()}"
        )


@triton.jit
def quantized(first, second, CODE_TYPE: tl.constexpr):
    """Heads whose halves are two tiles of float32 -> the same tiles as codes, and scales [heads].

    If a value is not finite, its head's codes are 0, and the scale is NaN.
    """
    # Magnitudes are in the order of their bits, and NaN comes last: as floats it would be lost.
    first_bits = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    second_bits = second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.maximum(first_bits, second_bits), axis=1)
    is_finite = largest < _INFINITY
    IS_E4M3: tl.constexpr = CODE_TYPE.is_uint8()
    LARGEST_CODE: tl.constexpr = 448.0 if IS_E4M3 else 127.0
    # `/` would do it with two wrong bits, other codes than torch's on any border between two.
    scale = tl.div_rn(
        largest.to(tl.float32, bitcast=True), tl.full(largest.shape, LARGEST_CODE, tl.float32)
    )
    scale = tl.maximum(tl.where(is_finite, scale, 0.0), _SMALLEST_SCALE)
    divisor = tl.broadcast_to(scale[:, None], first.shape)
    first = tl.div_rn(tl.where(is_finite[:, None], first, 0.0), divisor)
    second = tl.div_rn(tl.where(is_finite[:, None], second, 0.0), divisor)
    if IS_E4M3:
        first, second = to_e4m3(first), to_e4m3(second)
    else:
        first = ((first + _ROUNDER) - _ROUNDER).to(tl.int8)
        second = ((second + _ROUNDER) - _ROUNDER).to(tl.int8)
    return first, second, tl.where(is_finite, scale, float("nan"))


@triton.jit
def to_e4m3(x):
    """The 8 bits of magnitudes up to 448: a sign, 4 bits of exponent, 3 of mantissa."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # In a float32 the 7 bits lie 20 places higher, and the exponent counts from 127 and not 7.
    code = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9; the eighth of them has the first exponent.
    small = ((tl.abs(x) * 512.0 + _ROUNDER) - _ROUNDER).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), small, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def as_floats(values, scales_ptr, slot, is_seen, HEAD_DIM: tl.constexpr):
    """K or V of some slots, [slots, head_dim]; `slot` is where the values of each one begin.

    If scales_ptr is not None, they are codes, which lie contiguous, so that their heads are
    numbered as the scales are.
    """
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + slot // HEAD_DIM, mask=is_seen, other=0.0)
        values = unscaled(values) * scales[:, None]
    return values


@triton.jit
def unscaled(codes):
    """What codes of int8 or, as uint8, of e4m3 stand for, as float32."""
    if codes.dtype == tl.uint8:
        # A float16 has the same bits 7 places higher, with an exponent that counts from 15 and not
        # 7: it is 256 times too small, also where there is no exponent.
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return codes.to(tl.float32)
