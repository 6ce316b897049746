"""Quantize activations to 8 bits, with a scale per row (a token's inputs) or group of inputs.

In a real model a few inputs of a row are up to 25,000 times its median. With one scale for the row,
int8 rounds nearly all other inputs to 0; e4m3, which has an exponent, does not.

`quantize_rows` is a kernel of its own. With `kernel_config={"fused_quantization": True}`, norms and
activations compute the codes of their results, too, which are then an attribute of the result: see
`fused_codes`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel
from nanoserve.kernels.triton.quantized_kv import to_e4m3

LARGEST_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
GROUP_SIZES = (32, 64, 128)  # a tensor core multiplies 32 codes at once
MAX_INPUTS = 16384  # of a row that another kernel quantizes, because its registers hold all of it
_BLOCK = 2048  # inputs at once: 8 for each of the 256 threads of 8 warps
_INFINITY = tl.constexpr(0x7F800000)  # the bits of magnitudes that are not finite start here
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # added to a number below 2^22, it rounds, halves to even


class CodeFormat(NamedTuple):
    """Codes of activations: int8 or float8_e4m3fn, with a scale per row or per group of inputs."""

    dtype: torch.dtype
    group_size: int | None = None


class RowCodes(NamedTuple):
    """Rows of 8-bit codes [rows, inputs], and their float32 scales [rows] or [rows, groups]."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, x: torch.Tensor, code_format: CodeFormat) -> "RowCodes":
        """Return uninitialised codes of x [rows, inputs], those of e4m3 as bytes."""
        is_e4m3 = code_format.dtype == torch.float8_e4m3fn
        dtype = torch.uint8 if is_e4m3 else torch.int8  # older GPUs do not have the type e4m3
        shape = scale_shape(len(x), x.shape[1], code_format.group_size)
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
        return cls(torch.empty(x.shape, dtype=dtype, device=x.device), scale)


def attached_codes(x: torch.Tensor, code_format: CodeFormat) -> RowCodes | None:
    """Return the codes of this format that are attached to x, or None."""
    attached_format, codes = getattr(x, "row_codes", (None, None))
    return codes if attached_format == code_format else None


def fused_codes(result: torch.Tensor, code_format: CodeFormat | None, block: int) -> dict[str, Any]:
    """Attach codes to a result, and return the arguments of the kernel that computes both.

    The kernel calls `store_codes`; without a format it does not. result: [rows, inputs], which must
    not be changed later. Its views and copies have no codes, and they are freed with it.
    block: from `row_block`.
    """
    if code_format is None:
        return {"codes_ptr": None, "scales_ptr": None, "LARGEST_CODE": 0.0, "GROUP": 1}
    codes, scale = RowCodes.empty(result, code_format)
    attached = RowCodes(codes.view(code_format.dtype), scale)
    result.row_codes = code_format, attached  # type: ignore[attr-defined]
    return {
        "codes_ptr": codes,
        "scales_ptr": scale,
        "LARGEST_CODE": LARGEST_CODES[code_format.dtype],
        "GROUP": code_format.group_size or block,
    }


def row_block(inputs: int, code_format: CodeFormat | None) -> tuple[int, int]:
    """Return the block that a program needs for a whole row, and its number of warps."""
    block = 1 << (inputs - 1).bit_length()  # Triton's `next_power_of_2` takes microseconds
    if code_format is not None:
        block = max(block, code_format.group_size or 1)
    # 8 values per thread are one 16-byte load of 16-bit values; 512 threads leave registers for 32.
    return block, min(max(block // 256, 1), 16)


def quantize_rows(
    x: torch.Tensor,
    code_dtype: torch.dtype,
    largest: torch.Tensor | None = None,
    group_size: int | None = None,
    *,
    is_dependent: bool = False,
) -> RowCodes:
    """Quantize x [rows, inputs]; return codes of the same shape, and float32 scales [rows].

    x is contiguous, of any floating-point dtype; code_dtype is int8 or float8_e4m3fn. With a
    group_size of 32, 64 or 128 inputs, scales are [rows, groups], and the last group may be
    shorter. A scale is the largest magnitude of its row or group divided by the largest code.
    `largest`, float32 in the shape of the scales, has the magnitudes of the parts on other ranks:
    the larger one is used. If a row or group has NaN or infinity, its codes are 0 and the scale is
    NaN.
    is_dependent: use programmatic dependent launch.
    """
    if x.dim() != 2 or not x.is_contiguous() or not x.is_floating_point():
        raise ValueError(
            f"x {x.dtype} {list(x.shape)} must be contiguous, floating-point [rows, inputs]"
        )
    if code_dtype not in LARGEST_CODES:
        raise ValueError(f"code_dtype={code_dtype} must be one of {list(LARGEST_CODES)}")
    shape = scale_shape(len(x), x.shape[1], group_size)
    if largest is not None and (largest.dtype, largest.shape) != (torch.float32, shape):
        raise ValueError(
            f"largest must be float32 {list(shape)}, not {largest.dtype} {list(largest.shape)}"
        )
    codes, scales = RowCodes.empty(x, CodeFormat(code_dtype, group_size))
    if len(x) == 0:
        return RowCodes(codes.view(code_dtype), scales)
    largest = None if largest is None else largest.contiguous()
    common = {"INPUTS": x.shape[1], "LARGEST_CODE": LARGEST_CODES[code_dtype], "BLOCK": _BLOCK}
    common |= launch_options(is_dependent)
    if group_size is None:
        _quantize_rows[(len(x),)](codes, scales, x, largest, **common, num_warps=8)
    else:
        grid = (len(x), -(-x.shape[1] // _BLOCK))
        _quantize_groups[grid](
            codes, scales, x, largest, **common, GROUP=group_size, GROUPS=shape[1], num_warps=8
        )
    return RowCodes(codes.view(code_dtype), scales)


def scale_shape(rows: int, inputs: int, group_size: int | None) -> tuple[int, ...]:
    """Return the shape of the scales. Raises `ValueError` for an unsupported group size."""
    if group_size is None:
        return (rows,)
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size={group_size} must be one of {list(GROUP_SIZES)}")
    return (rows, -(-inputs // group_size))


@triton.jit
def _quantize_rows(
    codes_ptr,
    scales_ptr,
    x_ptr,
    largest_ptr,
    INPUTS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x_ptr += row * INPUTS
    codes_ptr += row * INPUTS
    # 1) Magnitudes are ordered like their bits, and NaN comes last; a maximum of floats loses it.
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, INPUTS, BLOCK):
        x = tl.load(x_ptr + start + i, mask=i < INPUTS - start, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    bits = tl.max(largest, 0)
    if largest_ptr is not None:
        bits = tl.maximum(bits, tl.load(largest_ptr + row).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    is_finite = bits < _INFINITY
    scale = _scale_of(bits, LARGEST_CODE)
    tl.store(scales_ptr + row, tl.where(is_finite, scale, float("nan")))
    # 2) Read the row again, from the L1 cache.
    divisor = tl.broadcast_to(scale, [BLOCK])
    for start in range(0, INPUTS, BLOCK):
        mask = i < INPUTS - start
        x = tl.load(x_ptr + start + i, mask=mask, other=0.0).to(tl.float32)
        quotient = tl.div_rn(tl.where(is_finite, x, 0.0), divisor)
        tl.store(codes_ptr + start + i, _codes_of(quotient, codes_ptr), mask=mask)


@triton.jit
def _quantize_groups(
    codes_ptr,
    scales_ptr,  # [rows, GROUPS], like largest
    x_ptr,
    largest_ptr,
    INPUTS: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    x = tl.load(x_ptr + row * INPUTS + i, mask=i < INPUTS, other=0.0).to(tl.float32)
    x = tl.reshape(x, [BLOCK // GROUP, GROUP])
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    if largest_ptr is not None:
        elsewhere = tl.load(largest_ptr + row * GROUPS + group, mask=group < GROUPS, other=0.0)
        bits = tl.maximum(bits, elsewhere.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    codes, scales = _quantized(x, bits, codes_ptr, LARGEST_CODE)
    tl.store(scales_ptr + row * GROUPS + group, scales, mask=group < GROUPS)
    tl.store(codes_ptr + row * INPUTS + i, tl.reshape(codes, [BLOCK]), mask=i < INPUTS)


@triton.jit
def store_codes(
    x,
    codes_ptr,
    scales_ptr,
    row,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Store codes and scales of a row x [BLOCK], which is 0 from INPUTS on.

    GROUP: inputs of a scale; BLOCK if the row has one. Codes and scales are as in `quantize_rows`.
    """
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    i, group = tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    x = tl.reshape(x.to(tl.float32), [BLOCK // GROUP, GROUP])
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    codes, scales = _quantized(x, bits, codes_ptr, LARGEST_CODE)
    tl.store(scales_ptr + row * GROUPS + group, scales, mask=group < GROUPS)
    tl.store(codes_ptr + row * INPUTS + i, tl.reshape(codes, [BLOCK]), mask=i < INPUTS)


@triton.jit
def _quantized(x, bits, codes_ptr, LARGEST_CODE: tl.constexpr):
    """Return codes and scales of x [groups, inputs], float32.

    bits: of the largest magnitude of each group.
    """
    is_finite = bits < _INFINITY
    scale = _scale_of(bits, LARGEST_CODE)
    divisor = tl.broadcast_to(scale[:, None], x.shape)
    quotient = tl.div_rn(tl.where(is_finite[:, None], x, 0.0), divisor)
    return _codes_of(quotient, codes_ptr), tl.where(is_finite, scale, float("nan"))


@triton.jit
def _scale_of(bits, LARGEST_CODE: tl.constexpr):
    """Return scales from the bits of the largest magnitudes.

    `/` may have two wrong bits, and some codes would not be the nearest.
    """
    magnitude = tl.where(bits < _INFINITY, bits.to(tl.float32, bitcast=True), 0.0)
    largest_code = tl.full(magnitude.shape, LARGEST_CODE, tl.float32)
    return tl.maximum(tl.div_rn(magnitude, largest_code), _SMALLEST_SCALE)


@triton.jit
def _codes_of(quotient, codes_ptr):
    if codes_ptr.dtype.element_ty == tl.uint8:
        return to_e4m3(quotient)
    else:
        return ((quotient + _ROUNDER) - _ROUNDER).to(tl.int8)
