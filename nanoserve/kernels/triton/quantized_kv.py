"""K and V in 8 bits, for the Triton kernels: to codes and scales, and back.

A value is its code x the scale of its token and head, float32; the largest magnitude of a head has
the largest code, 127 of int8 or 448 of e4m3. Bytes of the type uint8 are e4m3, and are put together
bit by bit: Triton's own type for it needs a GPU of compute capability 8.9 or newer, where attention
takes them apart by it.

Attention multiplies codes as they are, in float16, which has all of them; a query beyond its 65504
becomes infinite, and its row NaN. The scales of K are those of the columns of the scores, and the
scales of V belong to the weights.
"""

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.dependent_launch import current_capability

_INFINITY = tl.constexpr(0x7F800000)  # the bits of magnitudes that are not finite start here
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
# Added to a number below 2^22, it leaves no room for a fraction: it rounds, halves to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)
# Four codes become four float16. A byte c + 128 below the byte 0x64 is the float16 1024 + 128 + c.
_UNPACK_INT8 = tl.constexpr("""{
    .reg .b32 bytes, first, second, offset;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 first, bytes, 0x64646464, 0x4140;
    prmt.b32 second, bytes, 0x64646464, 0x4342;
    mov.b32 offset, 0x64806480;
    sub.f16x2 $0, first, offset;
    sub.f16x2 $1, second, offset;
}""")


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


def has_e4m3() -> bool:
    """Whether the GPU that kernels are launched on converts e4m3: from Ada and Hopper on."""
    return not triton.knobs.runtime.interpret and current_capability() >= 89


def has_warp_products(block_m: int) -> bool:
    """Whether a warp's tensor cores multiply `block_m` rows from registers.

    Those of Hopper and of a B200 multiply 64 rows or more from shared memory.
    """
    if triton.knobs.runtime.interpret:
        return False
    return block_m < 64 or current_capability() // 10 not in (9, 10, 11)


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
def load_scales(scales_ptr, slot, is_seen, HEAD_DIM: tl.constexpr, IS_LOG: tl.constexpr):
    """The scales of K's or V's codes in some slots, or their logarithms to base 2.

    `slot` is where the codes of each one begin. They lie contiguous, so that their heads are
    numbered as the scales are.
    """
    scales = tl.load(scales_ptr + slot // HEAD_DIM, mask=is_seen, other=1.0)
    if IS_LOG:
        # Smaller ones are taken for 2^-64, so that their reciprocals have a finite sum: a value is
        # wrong by 10^-16 at most. A maximum would lose NaN.
        scales = tl.log2(scales)
        scales = tl.where(scales < -64, -64.0, scales)
    # A sum over one column is the number itself. Without it every thread would load the scales of
    # all scores that it has, and the tables for them: a fifth of a tile's instructions.
    return tl.sum(scales[:, None], 1)


@triton.jit
def as_operand(x, DOT_DTYPE: tl.constexpr, HAS_E4M3: tl.constexpr, IN_ROWS: tl.constexpr):
    """K or V as loaded, [slots, head_dim], in the dtype of products; codes without their scales.

    HAS_E4M3: conversions in hardware. IN_ROWS: this is V, and each warp multiplies by itself.
    """
    if not x.dtype.is_int():
        return x.to(DOT_DTYPE)
    elif DOT_DTYPE.is_fp32():
        return unscaled(x)
    else:
        if x.dtype == tl.int8:
            x = tl.inline_asm_elementwise(_UNPACK_INT8, "=r,=r,r", [x], tl.float16, True, pack=4)
        elif HAS_E4M3:
            x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            x = unscaled(x).to(tl.float16)
        if IN_ROWS:
            # A warp's products want V transposed. Loads from shared memory do that for 16 bits, but
            # not for 8, and the compiler would convert what it has loaded there byte by byte, were
            # it not for an operation that it may not move. This one does nothing.
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float16, False, pack=2)
        return x


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
