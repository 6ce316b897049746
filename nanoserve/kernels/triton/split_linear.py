"""Matrix products of a step with few rows, whose inputs are split over programs.

With up to 256 rows a product is limited by the memory bandwidth for its weight. A library's kernel
has a program for each tile of the output, which for 1,024 outputs are 8 or 16: most of the GPU is
idle. Here each tile has several programs, with a part of the inputs each ("split-K"). The program
that stores its partial sums last adds all of them, in the order of the inputs, so that the result
does not depend on the order in which programs arrive.

The product of the gate and up projections applies SwiGLU or GEGLU before it stores its result: half
the bytes, and one launch less.

`tiled_linear` uses the same kernel for any number of rows, with one tile shape and without splits:
a row's result does not depend on other rows. Libraries do not promise that, because they choose a
kernel by the number of rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.act_and_mul import ACTIVATIONS, gated
from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel
from nanoserve.kernels.triton.split_work import (
    PROGRAMS,
    arrives_last,
    check_arrivals,
    most_arrivals,
    num_multiprocessors,
)

MOST_ROWS = 256  # with more, products are limited by tensor cores, and libraries are better
_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_FEWEST_STEPS = 2  # of a part of the inputs
_MOST_PARTS = 16


class TileConfig(NamedTuple):
    """Tile sizes and launch parameters of a product."""

    block_m: int  # rows
    block_n: int  # rows of the weight; of a gated product, half of them are gates
    block_k: int  # inputs at once
    num_warps: int
    num_stages: int


def tile_config(num_rows: int, dtype: torch.dtype) -> TileConfig:
    """Return tile sizes, chosen by bytes in flight, registers and shared memory (99 KiB suffice).

    They have not been tuned by measurements. A variant of the kernel is compiled for each of the
    three sizes, which 1, 17 and 129 rows reach.
    """
    if dtype == torch.float32:  # not supported by tensor cores: operands go through registers
        return TileConfig(16 if num_rows <= 16 else 32, 32, 32, 4, 3)
    if num_rows <= 16:
        return TileConfig(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4)
    if num_rows <= 64:
        return TileConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=5)
    return TileConfig(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)


def fixed_tile_config(dtype: torch.dtype) -> TileConfig:
    """Return the tile sizes of `tiled_linear`. They have not been tuned by measurements."""
    if dtype == torch.float32:
        return TileConfig(32, 32, 32, 4, 3)
    return TileConfig(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=4)


def num_parts(num_rows: int, weight: torch.Tensor) -> int:
    """Return the number of parts into which the inputs of a product are split: 1 if not at all."""
    outputs, inputs = weight.shape
    config = tile_config(num_rows, weight.dtype)
    row_tiles = -(-num_rows // config.block_m)
    num_tiles = row_tiles * -(-outputs // config.block_n)
    wanted = PROGRAMS * num_multiprocessors(weight.device) // num_tiles
    num_steps = -(-inputs // config.block_k)
    # Partial sums, written and read, are at most twice the weight's bytes; the L2 cache has them.
    worth = inputs // (2 * row_tiles * config.block_m)
    most = max(1, min(wanted, worth, num_steps // _FEWEST_STEPS, _MOST_PARTS))
    return 1 << (most.bit_length() - 1)  # a power of two usually gives parts of equal size


def split_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor,
    activation: str | None = None,
    *,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Return x W^T, [num_rows, inputs] x [outputs, inputs] -> [num_rows, outputs], in x's dtype.

    x, weight: contiguous, float32, float16 or bfloat16, at most `MOST_ROWS` rows.
    arrivals: int32 zeros [`most_arrivals`] on the device, which no other stream uses; they are
    zeros again when the kernel has ended.
    activation: one of `ACTIVATIONS`; the first half of the outputs are then gates, and the result
    is activation(gate) * up, [num_rows, outputs / 2], of sums that are not rounded before.
    is_dependent: use programmatic dependent launch.

    Sums are float32. Their order depends on the number of rows and on the GPU.
    """
    _check(x, weight, activation)
    if len(x) > MOST_ROWS:
        raise ValueError(f"x must have at most {MOST_ROWS} rows, not {len(x)}")
    check_arrivals(arrivals, most_arrivals(x.device))
    config, parts = tile_config(len(x), x.dtype), num_parts(len(x), weight)
    return _launch(x, weight, arrivals, activation, config, parts, is_dependent)


def tiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    activation: str | None = None,
    *,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Return what `split_linear` returns, for any number of rows, each as if it were alone.

    Sums are float32, in the order of the inputs. Slower than a library where that chooses larger
    tiles.
    """
    _check(x, weight, activation)
    config = fixed_tile_config(x.dtype)
    return _launch(x, weight, None, activation, config, 1, is_dependent)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    arrivals: torch.Tensor | None,
    activation: str | None,
    config: TileConfig,
    parts: int,
    is_dependent: bool,
) -> torch.Tensor:
    num_rows, inputs = x.shape
    outputs, halves = len(weight), 1 if activation is None else 2
    out = x.new_empty(num_rows, outputs // halves)
    if out.numel() == 0:
        return out
    block_n = config.block_n // halves
    grid = (-(-num_rows // config.block_m), -(-(outputs // halves) // block_n), parts)
    num_steps = -(-inputs // config.block_k)
    sums = x.new_empty(halves, parts, *out.shape, dtype=torch.float32) if parts > 1 else None
    interpreted = triton.knobs.runtime.interpret  # which computes bfloat16 products incorrectly
    _split_linear[grid](
        out,
        sums,
        arrivals if parts > 1 else None,
        x,
        weight,
        num_rows,
        -(-num_steps // parts),
        INPUTS=inputs,
        OUTPUTS=outputs // halves,
        ACTIVATION=activation,
        BLOCK_M=config.block_m,
        BLOCK_N=block_n,
        BLOCK_K=config.block_k,
        DOT_DTYPE=tl.float32 if interpreted else _TRITON_DTYPES[x.dtype],
        DOT_PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(is_dependent),
    )
    return out


def _check(x: torch.Tensor, weight: torch.Tensor, activation: str | None) -> None:
    wrong = None
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        wrong = "x must be [rows, inputs] and weight [outputs, inputs]"
    elif x.dtype not in _TRITON_DTYPES or weight.dtype != x.dtype:
        wrong = "both must be float32, float16 or bfloat16"
    elif not (x.is_contiguous() and weight.is_contiguous()):
        wrong = "both must be contiguous"
    elif activation is not None and (activation not in ACTIVATIONS or len(weight) % 2):
        wrong = f"activation={activation!r} must be one of {ACTIVATIONS}, with an even weight"
    if wrong is not None:  # formatted only on error: this is called several times in every layer
        given = ", ".join(f"{list(each.shape)} of {each.dtype}" for each in (x, weight))
        raise ValueError(f"{wrong}: x and weight are {given}")


# Rows and parts change from step to step, and must not recompile the kernel.
@triton.jit(do_not_specialize=["num_rows", "steps_of_part"])
def _split_linear(
    out_ptr,  # [num_rows, OUTPUTS]
    sums_ptr,  # None, or float32 [1 or 2, parts, num_rows, OUTPUTS]
    arrivals_ptr,  # None, or int32, one for each tile of the output; zero between launches
    x_ptr,  # [num_rows, INPUTS]
    weight_ptr,  # [OUTPUTS, INPUTS]; with an activation, gates and then as many others
    num_rows,
    steps_of_part,  # steps of BLOCK_K inputs
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    part, num_parts = tl.program_id(2), tl.num_programs(2)
    k = tl.arange(0, BLOCK_K)
    # 1) The sums over this part of the inputs. int64: a weight may have more than 2^31 values.
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * INPUTS + k[None, :]
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = part * steps_of_part * BLOCK_K
    for start in range(first, min(first + steps_of_part * BLOCK_K, INPUTS), BLOCK_K):
        in_row = tl.full([BLOCK_K], True, tl.int1)
        if INPUTS % BLOCK_K != 0:
            in_row = k < INPUTS - start
        x = tl.load(x_ptrs + start, mask=(m < num_rows)[:, None] & in_row[None, :], other=0.0)
        weight_mask = (n < OUTPUTS)[:, None] & in_row[None, :]
        weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0.0)
        x = x.to(DOT_DTYPE)
        weight = tl.trans(weight.to(DOT_DTYPE))
        acc = tl.dot(x, weight, acc, input_precision=DOT_PRECISION)
        if ACTIVATION is not None:
            other = tl.load(weight_ptrs + OUTPUTS * INPUTS + start, mask=weight_mask, other=0.0)
            other = tl.trans(other.to(DOT_DTYPE))
            up = tl.dot(x, other, up, input_precision=DOT_PRECISION)

    # 2) Add the sums of all parts, in the program that stores its own last.
    mask = (m < num_rows)[:, None] & (n < OUTPUTS)[None, :]
    out_offsets = m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    is_last = True
    if sums_ptr is not None:
        size = num_rows.to(tl.int64) * OUTPUTS
        own = sums_ptr + part * size + out_offsets
        tl.store(own, acc, mask=mask)
        if ACTIVATION is not None:
            tl.store(own + num_parts * size, up, mask=mask)
        arrivals = arrivals_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last = arrives_last(arrivals, num_parts)
        if is_last:
            acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            for each in range(num_parts):
                # From the L2 cache: other programs have written them while this one ran.
                sums = sums_ptr + each * size + out_offsets
                acc += tl.load(sums, mask=mask, other=0.0, cache_modifier=".cg")
                if ACTIVATION is not None:
                    others = sums + num_parts * size
                    up += tl.load(others, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrivals, 0)

    # 3) The result.
    if is_last:
        if ACTIVATION is not None:
            acc = gated(acc, up, ACTIVATION)
        tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=mask)
