"""Convert an 8-bit KV cache to codes and scales and back, in the Triton kernels.

A value is its code x the scale of its token and head, float32; the largest magnitude of a head has
the largest code, 127 for int8 or 448 for e4m3. Bytes of the type uint8 are e4m3, and are converted
to it by bit operations: Triton's own type for it needs a GPU of compute capability 8.9 or newer,
where attention uses it to convert codes back.

Attention multiplies unscaled codes, in float16, which represents all of them exactly; a query
beyond float16's 65504 becomes infinite, and its row NaN. The scales of K are applied to the columns
of the scores, and the scales of V to the weights.
"""

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.dependent_launch import current_capability

_INFINITY = tl.constexpr(0x7F800000)  # the bits of magnitudes that are not finite start here
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
# Added to a number below 2^22, it leaves no bits for a fraction: so it rounds, halves to even.
_ROUNDER = tl.constexpr(1.5 * 2**23)
# Converts four codes to four float16. A byte c + 128 below the byte 0x64 is the float16 1024 + 128
# + c.
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
    """Raise `ValueError` unless the cache is of `dtype`, or has contiguous codes with their scales.

    kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim]; kv_scales: float32, without
    head_dim, or None for floats.
    """
    if kv_scales is None:
        if kv_cache.dtype != dtype:
            raise ValueError(
                f"kv_cache must have dtype {dtype}, or codes with kv_scales, not {kv_cache.dtype}"
            )
        return
    is_good = kv_cache.dtype in (torch.int8, torch.uint8) and kv_scales.dtype == torch.float32
    if not is_good or kv_scales.shape != kv_cache.shape[:-1]:
        raise ValueError(
            f"codes {kv_cache.dtype} {list(kv_cache.shape)} must be int8 or uint8, and scales "
            f"{kv_scales.dtype} {list(kv_scales.shape)} float32, one for each head of each KV slot"
        )
    if not (kv_cache.is_contiguous() and kv_scales.is_contiguous()):
        raise ValueError(
            f"codes and scales must be contiguous, not {kv_cache.stride()}, {kv_scales.stride()}"
        )


def has_e4m3() -> bool:
    """Return True if the current GPU converts e4m3 in hardware: from Ada and Hopper on."""
    return not triton.knobs.runtime.interpret and current_capability() >= 89


def has_warp_products(block_m: int) -> bool:
    """Return True if a warp's tensor cores multiply `block_m` rows from registers.

    Those of Hopper and of a B200 multiply 64 rows or more from shared memory.
    """
    if triton.knobs.runtime.interpret:
        return False
    return block_m < 64 or current_capability() // 10 not in (9, 10, 11)


@triton.jit
def quantized(first, second, CODE_TYPE: tl.constexpr):
    """Quantize heads, given as two tiles of float32; return two tiles of codes, and scales [heads].

    If a value is not finite, its head's codes are 0, and the scale is NaN.
    """
    # Magnitudes are ordered like their bits, and NaN comes last; a maximum of floats would lose it.
    first_bits = first.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    second_bits = second.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.maximum(first_bits, second_bits), axis=1)
    is_finite = largest < _INFINITY
    IS_E4M3: tl.constexpr = CODE_TYPE.is_uint8()
    LARGEST_CODE: tl.constexpr = 448.0 if IS_E4M3 else 127.0
    # `/` may have two wrong bits, and would give other codes than torch's at rounding borders.
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
    """Return the 8 bits of magnitudes up to 448: a sign, 4 bits of exponent, 3 of mantissa."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # In a float32 these 7 bits are 20 positions higher, and the exponent bias is 127, not 7.
    code = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2^-6 are multiples of 2^-9; 8 x 2^-9 has the first exponent.
    small = ((tl.abs(x) * 512.0 + _ROUNDER) - _ROUNDER).to(tl.int32)
    code = tl.where(magnitude < (121 << 23), small, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def load_scales(scales_ptr, slot, is_seen, HEAD_DIM: tl.constexpr, IS_LOG: tl.constexpr):
    """Load the scales of K's or V's codes in some KV slots, or their logarithms to base 2.

    `slot` has the offsets at which the codes of each KV slot begin. Codes are contiguous, so
    dividing by HEAD_DIM gives the index of the scale.
    """
    scales = tl.load(scales_ptr + slot // HEAD_DIM, mask=is_seen, other=1.0)
    if IS_LOG:
        # Smaller scales are replaced by 2^-64, so that the sum of their reciprocals is finite: the
        # error of a value is at most 10^-16. A maximum would lose NaN.
        scales = tl.log2(scales)
        scales = tl.where(scales < -64, -64.0, scales)
    # The sum over one column is the number itself. Without it every thread would load the scales of
    # all its scores, and the block table entries for them: a fifth of a tile's instructions.
    return tl.sum(scales[:, None], 1)


@triton.jit
def as_operand(x, DOT_DTYPE: tl.constexpr, HAS_E4M3: tl.constexpr, IN_ROWS: tl.constexpr):
    """Return loaded K or V, [KV slots, head_dim], in the dtype of products; codes without scales.

    HAS_E4M3: conversions in hardware. IN_ROWS: x is V, and each warp multiplies by itself.
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
            # A warp's products need V transposed. Loads from shared memory do that for 16 bits, but
            # not for 8, and the compiler would convert loaded values there byte by byte, unless
            # there is an operation that it cannot move. This operation does nothing else.
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float16, False, pack=2)
        return x


@triton.jit
def unscaled(codes):
    """Return the unscaled values of codes of int8 or, as uint8, of e4m3, in float32."""
    if codes.dtype == tl.uint8:
        # A float16 has the same bits 7 positions higher, with an exponent bias of 15 instead of 7:
        # it is 256 times too small, also for subnormals.
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        return codes.to(tl.float32)
