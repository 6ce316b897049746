"""Matrix products of 4-bit or 8-bit weights, scaled per channel or group, and float activations.

Codes are converted to floats in registers, as operands of tensor cores: memory traffic is a quarter
of 16-bit traffic (or half), which determines the time while a step has few rows (Frantar et al.
2024, "MARLIN"). A program computes some outputs for all rows of a tile; with few rows, only for a
part of the inputs, so that there are programs for the whole GPU, and the partial sums are added.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel
from nanoserve.kernels.triton.quantized_kv import unscaled
from nanoserve.kernels.triton.split_work import num_multiprocessors

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_SUM_BLOCK = 1024  # values per program
_FEWEST_STEPS = 4  # per part of the inputs: with fewer, loads cannot overlap
_MOST_PARTS = 8


class GroupedWeight(NamedTuple):
    """Weight as codes with scales per group.

    codes    int8 or float8_e4m3fn [outputs, inputs]; or, two to a byte, uint8 [outputs,
             inputs / 2]: the first half of the inputs low, the second high, each as code + 8
    scale    float32 [outputs, groups]
    offset   float32 [outputs, groups]; None is all zeros
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.codes.dtype == torch.uint8 else 1)


class TileConfig(NamedTuple):
    """Tile sizes and launch parameters of a product."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # codes at once; if a byte has two, bytes
    num_warps: int
    num_stages: int


def tile_config(num_rows: int, dtype: torch.dtype) -> TileConfig:
    """Return tile sizes, chosen by bytes in flight, registers and shared memory (99 KiB suffice).

    They have not been tuned by measurements.
    """
    if dtype == torch.float32:  # not supported by tensor cores: operands go through registers
        return TileConfig(16 if num_rows <= 16 else 32, 32, 32, 4, 3)
    if num_rows <= 16:  # limited by memory bandwidth
        return TileConfig(block_m=16, block_n=64, block_k=64, num_warps=4, num_stages=5)
    if num_rows <= 128:
        return TileConfig(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=4)
    return TileConfig(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=3)


def pack_groups(
    codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None, bits: int = 8
) -> GroupedWeight:
    """Convert weights to the kernel's layout, on their device.

    codes: int8, of 4 or 8 bits, or float8_e4m3fn [outputs, inputs]. scale and offset: float32
    [outputs, groups], in which a group is a run of inputs, all of the same length.
    """
    outputs, inputs = codes.shape
    groups = scale.shape[-1] if scale.dim() == 2 else 0
    shapes = [list(values.shape) for values in (scale, offset) if values is not None]
    if groups == 0 or inputs % groups or any(shape != [outputs, groups] for shape in shapes):
        raise ValueError(
            f"codes {list(codes.shape)} and scale and offset {shapes} must be [outputs, inputs] "
            f"and [outputs, groups], in groups of equal size"
        )
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"codes must be int8 or float8_e4m3fn, not {codes.dtype}")
    if bits == 4 and inputs % 2 == 0:
        unsigned = (codes + 8).view(torch.uint8)
        codes = unsigned[:, : inputs // 2] | unsigned[:, inputs // 2 :] << 4
    offset = None if offset is None else offset.contiguous()
    return GroupedWeight(codes.contiguous(), scale.contiguous(), offset)


def grouped_product(
    x: torch.Tensor, weight: GroupedWeight, *, is_dependent: bool = False
) -> torch.Tensor:
    """Return the product [rows, inputs] -> [rows, outputs], in x's dtype.

    x is contiguous float32, float16 or bfloat16. A weight is code x scale + offset in float32,
    rounded to x's dtype; sums are float32, in an order that depends on the number of rows, and
    there are no atomic additions.
    is_dependent: use programmatic dependent launch.
    """
    (num_rows, inputs), (outputs, stored) = x.shape, weight.codes.shape
    if inputs != weight.inputs or x.dtype not in _TRITON_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous, floating-point, with {weight.inputs} inputs, not {x.dtype} "
            f"{list(x.shape)}"
        )
    out = x.new_empty(num_rows, outputs)
    if out.numel() == 0:
        return out
    config = tile_config(num_rows, x.dtype)
    grid = (-(-num_rows // config.block_m), -(-outputs // config.block_n))
    launch = launch_options(is_dependent)
    num_steps = -(-stored // config.block_k)
    num_parts = _num_parts(grid[0] * grid[1], num_steps, x.device)
    sums = out if num_parts == 1 else x.new_empty(num_parts, *out.shape, dtype=torch.float32)
    groups = weight.scale.shape[1]
    codes = weight.codes
    if codes.dtype == torch.float8_e4m3fn:  # older GPUs do not have this type
        codes = codes.view(torch.uint8)
    interpreted = triton.knobs.runtime.interpret  # which computes bfloat16 products incorrectly
    _grouped_product[(grid[0], grid[1], num_parts)](
        sums,
        x,
        codes,
        weight.scale,
        weight.offset,
        num_rows,
        -(-num_steps // num_parts),
        INPUTS=inputs,
        OUTPUTS=outputs,
        STORED=stored,
        GROUP=inputs // groups,
        # Within a tile, which need not start where a group starts.
        RUN=math.gcd(config.block_k, inputs // groups, stored),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        DOT_DTYPE=tl.float32 if interpreted else _TRITON_DTYPES[x.dtype],
        DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch,
    )
    if num_parts > 1:
        num_blocks = -(-out.numel() // _SUM_BLOCK)
        _sum_parts[(num_blocks,)](
            out, sums, out.numel(), num_parts, MOST_PARTS=_MOST_PARTS, BLOCK=_SUM_BLOCK, **launch
        )
    return out


def _num_parts(num_tiles: int, num_steps: int, device: torch.device) -> int:
    """Return the number of parts of the inputs, for two programs per multiprocessor."""
    wanted = 2 * num_multiprocessors(device) // num_tiles
    num_parts = max(1, min(wanted, num_steps // _FEWEST_STEPS, _MOST_PARTS))
    return 1 << (num_parts.bit_length() - 1)  # a power of two usually gives parts of equal size


# Rows and parts change from step to step, and must not recompile the kernel.
@triton.jit(do_not_specialize=["num_rows", "steps_of_part"])
def _grouped_product(
    out_ptr,  # [num_rows, OUTPUTS], or [parts, num_rows, OUTPUTS]
    x_ptr,  # [num_rows, INPUTS]
    codes_ptr,  # [OUTPUTS, STORED]
    scale_ptr,
    offset_ptr,
    num_rows,
    steps_of_part,  # steps of BLOCK_K codes
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    run = tl.arange(0, BLOCK_K // RUN) * RUN
    row, output = m.to(tl.int64), n.to(tl.int64)
    # Outputs precede rows, because the first operand of a product may be in registers.
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first = tl.program_id(2) * steps_of_part * BLOCK_K
    for start in range(first, min(first + steps_of_part * BLOCK_K, STORED), BLOCK_K):
        in_row, run_in_row = k < STORED - start, run < STORED - start
        mask = (n < OUTPUTS)[:, None] & in_row[None, :]
        codes = tl.load(codes_ptr + output[:, None] * STORED + start + k, mask=mask, other=0)
        for half in tl.static_range(INPUTS // STORED):
            if INPUTS != STORED:
                values = (((codes >> (4 * half)) & 0xF).to(tl.int32) - 8).to(tl.float32)
            else:
                values = unscaled(codes)
            # 1) Codes to weights: a scale for each run of inputs.
            begin = start + half * STORED
            group = output[:, None] * (INPUTS // GROUP) + ((begin + run) // GROUP)[None, :]
            group_mask = (n < OUTPUTS)[:, None] & run_in_row[None, :]
            scale = tl.load(scale_ptr + group, mask=group_mask, other=0.0)
            values = tl.reshape(values, [BLOCK_N, BLOCK_K // RUN, RUN]) * scale[:, :, None]
            if offset_ptr is not None:
                values += tl.load(offset_ptr + group, mask=group_mask, other=0.0)[:, :, None]
            weight = tl.reshape(values, [BLOCK_N, BLOCK_K]).to(x_ptr.dtype.element_ty)
            # 2) The product.
            x_mask = in_row[:, None] & (m < num_rows)[None, :]
            x = tl.load(x_ptr + row[None, :] * INPUTS + begin + k[:, None], mask=x_mask, other=0.0)
            acc = tl.dot(weight.to(DOT_DTYPE), x.to(DOT_DTYPE), acc, input_precision=DOT_PRECISION)
    out_ptr += tl.program_id(2).to(tl.int64) * num_rows * OUTPUTS
    out_ptrs = out_ptr + row[None, :] * OUTPUTS + n[:, None]
    mask = (n < OUTPUTS)[:, None] & (m < num_rows)[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_values", "num_parts"])
def _sum_parts(
    out_ptr,
    sums_ptr,
    num_values,
    num_parts,
    MOST_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(MOST_PARTS):  # all loads at once; absent parts are masked
        mask = i < tl.where(num_parts > part, num_values, 0)
        total += tl.load(sums_ptr + part * num_values + i, mask=mask, other=0.0)
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=i < num_values)
