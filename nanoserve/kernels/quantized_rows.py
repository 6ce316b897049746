"""Activations in 8 bits: each row, a token's inputs, gets one scale when it is multiplied."""

import torch
import triton
import triton.language as tl

from nanoserve.kernels.quantized_kv import to_e4m3

LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_BLOCK = 2048  # inputs at once: 8 for each of the 256 threads of 8 warps
_INFINITY = tl.constexpr(0x7F800000)  # the bits of magnitudes that are not finite start here
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a number below 2^22, it rounds, halves to even


def quantize_rows(
    x: torch.Tensor, code_dtype: torch.dtype, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, inputs] -> codes of `code_dtype`, the same shape, and float32 scales [rows].

    x is contiguous, of any floating type; code_dtype is int8 or float8_e4m3fn. A scale is the row's
    largest magnitude over the largest code. `largest`, float32 [rows], are magnitudes elsewhere, of
    the parts that other ranks have of the rows: the larger one counts. Of a row that holds NaN or
    infinity, codes are 0 and the scale is NaN.
    """
    if x.dim() != 2 or not x.is_contiguous() or not x.is_floating_point():
        raise ValueError(f"x {x.dtype} {list(x.shape)} is no contiguous, floating [rows, inputs]")
    if code_dtype not in LARGEST_CODES:
        raise ValueError(f"code_dtype={code_dtype} is none of {list(LARGEST_CODES)}")
    if largest is not None and (largest.dtype, largest.shape) != (torch.float32, x.shape[:1]):
        raise ValueError(
            f"largest must be float32 [{len(x)}], not {largest.dtype} {list(largest.shape)}"
        )
    is_e4m3 = code_dtype == torch.float8_e4m3fn
    codes = torch.empty(x.shape, dtype=torch.uint8 if is_e4m3 else torch.int8, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        _quantize_rows[(len(x),)](
            codes,
            scales,
            x,
            largest,
            INPUTS=x.shape[1],
            LARGEST_CODE=LARGEST_CODES[code_dtype],
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return codes.view(code_dtype), scales


@triton.jit
def _quantize_rows(
    codes_ptr,
    scales_ptr,
    x_ptr,
    largest_ptr,
    INPUTS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x_ptr += row * INPUTS
    codes_ptr += row * INPUTS
    # 1) Magnitudes are in the order of their bits, and NaN comes last: as floats it would be lost.
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, INPUTS, BLOCK):
        x = tl.load(x_ptr + start + i, mask=i < INPUTS - start, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(largest, 0)
    if largest_ptr is not None:
        bits = tl.maximum(bits, tl.load(largest_ptr + row).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    is_finite = bits < _INFINITY
    # 2) `/` would do it with two wrong bits: not every code would be the nearest.
    magnitude = tl.where(is_finite, bits.to(tl.float32, bitcast=True), 0.0)
    scale = tl.maximum(tl.div_rn(magnitude, tl.full([], LARGEST_CODE, tl.float32)), _SMALLEST_SCALE)
    tl.store(scales_ptr + row, tl.where(is_finite, scale, float("nan")))
    # 3) The row again, out of the nearest cache.
    divisor = tl.broadcast_to(scale, [BLOCK])
    for start in range(0, INPUTS, BLOCK):
        mask = i < INPUTS - start
        x = tl.load(x_ptr + start + i, mask=mask, other=0.0).to(tl.float32)
        quotient = tl.div_rn(tl.where(is_finite, x, 0.0), divisor)
        if codes_ptr.dtype.element_ty == tl.uint8:
            codes = to_e4m3(quotient)
        else:
            codes = ((quotient + _ROUNDER) - _ROUNDER).to(tl.int8)
        tl.store(codes_ptr + start + i, codes, mask=mask)
