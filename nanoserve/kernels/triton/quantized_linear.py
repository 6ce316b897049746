"""Matrix products of 8-bit codes: activations with scales per row or group, per-channel weights.

    y[m, n] = (sum over groups g of x_scale[m, g] (sum over k in g of x[m, k] w[n, k])) w_scale[n]

Codes are int8, whose sums in int32 are exact; floats are added in the order of the groups, so a
row's result depends only on the row, for any tile sizes. Or they are e4m3 (FP8; Micikevicius et al.
2022) with a scale for a whole row, on GPUs of compute capability 8.9 and newer: in bfloat16 the
product is then `torch._scaled_mm`'s, wherever that supports it: see `least_scaled_mm_rows`.
"""

import logging
import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel
from nanoserve.kernels.triton.quantized_rows import LARGEST_CODES, scale_shape

logger = logging.getLogger(__name__)

_MULTIPLE = 16  # required of inputs and of outputs by `torch._scaled_mm`
NEVER = sys.maxsize  # more rows than any step has
# Starting with the fewest for which it is faster: on an H100, our own kernel takes 0.59 to 1.07 of
# its time with up to 128 rows, and 1.1 to 1.8 with 256 (1,024 to 12,288 inputs). Even and odd
# numbers on both sides of 256, where a known range of sizes that cuBLAS rejects ends.
_TRIED_ROWS = (129, 256, 257, 512, 513)
_least_rows: dict[tuple[int, int, torch.device], int] = {}  # by inputs, outputs and device


class TileConfig(NamedTuple):
    """Tile sizes and launch parameters of a product."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # inputs at once
    num_warps: int
    num_stages: int


def tile_config(num_rows: int, group_size: int | None = None) -> TileConfig:
    """Return tile sizes, chosen by bytes in flight, registers and shared memory (99 KiB suffice).

    Measured for e4m3 only: 4,096 inputs and outputs take an H100 9 us with 16 rows or fewer, 12.5
    with 128, 22 with 256 and 82 with 2,048; bfloat16 16, 15, 19 and 86.

    Each configuration is compiled on first use: the smallest and the largest step, which are run
    before serving, use the first and the last, and CUDA graphs of decode steps the second. With
    groups, a program multiplies one group at a time, with more of them in flight.
    """
    if group_size is not None:
        if num_rows <= 16:
            return TileConfig(16, 64, group_size, num_warps=4, num_stages=6)
        if num_rows <= 128:
            return TileConfig(64, 64, group_size, num_warps=4, num_stages=5)
        return TileConfig(128, 128, group_size, num_warps=8, num_stages=3)
    if num_rows <= 16:  # limited by memory bandwidth; 4096 outputs give an H100 128 programs
        return TileConfig(block_m=16, block_n=32, block_k=256, num_warps=4, num_stages=5)
    if num_rows <= 128:
        return TileConfig(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=4)
    return TileConfig(block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=3)


def scaled_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
    group_size: int | None = None,
    scaled_mm_from: int = NEVER,
    *,
    is_dependent: bool = False,
) -> torch.Tensor:
    """Return the product of codes [rows, inputs] and [outputs, inputs], [rows, outputs] of `dtype`.

    x and weight are contiguous, both int8 or both float8_e4m3fn; scales are float32: x's [rows], or
    for int8 with a group_size (32, 64 or 128 inputs) [rows, groups], and weight's [outputs]. Sums
    of e4m3 are float32. scaled_mm_from: the number of rows of e4m3 from which `torch._scaled_mm` is
    used, from `least_scaled_mm_rows` for this weight.
    is_dependent: use programmatic dependent launch of our own kernel.
    """
    _check(x, x_scale, weight, weight_scale, group_size)
    (num_rows, inputs), outputs = x.shape, len(weight)
    if num_rows >= scaled_mm_from:
        return _scaled_mm(x, x_scale, weight, weight_scale, dtype)
    out = torch.empty(num_rows, outputs, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    config = tile_config(num_rows, group_size)
    # Consecutive programs use the same outputs' weights for other rows. The grid is computed in
    # plain Python: Triton's `cdiv` takes microseconds, in every layer.
    grid = (-(-num_rows // config.block_m), -(-outputs // config.block_n))
    _scaled_product[grid](
        out,
        x,
        x_scale,
        weight,
        weight_scale,
        num_rows,
        INPUTS=inputs,
        OUTPUTS=outputs,
        GROUPS=0 if group_size is None else x_scale.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(is_dependent),
    )
    return out


def least_scaled_mm_rows(
    weight: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype
) -> int:
    """Return the number of rows from which `torch._scaled_mm` is used; `NEVER` if it is not.

    Which products it supports depends on the GPU, on the libraries' versions, and on all three
    sizes. torch 2.11 with CUDA 13.0 supports all on an H100; other versions have none there for
    9,216 inputs with 256 rows or fewer, and on an RTX 5000 Blackwell none at all
    (https://github.com/pytorch/ao/issues/4582 and pytorch/issues/192707). So it is tried once for
    each pair of sizes, before serving, and never while a graph is captured.
    """
    outputs, inputs = weight.shape
    # With scales per row, it returns only bfloat16 on every GPU.
    if dtype != torch.bfloat16 or inputs % _MULTIPLE or outputs % _MULTIPLE:
        return NEVER
    key = inputs, outputs, weight.device
    if key not in _least_rows:
        _least_rows[key] = _try_scaled_mm(weight, weight_scale)
    return _least_rows[key]


def _try_scaled_mm(weight: torch.Tensor, weight_scale: torch.Tensor) -> int:
    """Try `torch._scaled_mm`, most rows first: it is not used below a number it rejects."""
    outputs, inputs = weight.shape
    least = NEVER
    for num_rows in reversed(_TRIED_ROWS):
        x = torch.zeros(num_rows, inputs, dtype=torch.uint8, device=weight.device)
        x_scale = torch.ones(num_rows, device=weight.device)
        try:
            _scaled_mm(x.view(weight.dtype), x_scale, weight, weight_scale, torch.bfloat16)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            logger.info(
                "torch._scaled_mm does not support e4m3 with %d inputs, %d outputs and %d rows, so "
                "nanoserve's own kernel is used for %s: %s",
                *(inputs, outputs, num_rows),
                "any number of rows" if least == NEVER else f"up to {least - 1} rows",
                str(error).partition("\n")[0],
            )
            break
        least = num_rows
    return least


def _scaled_mm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch._scaled_mm(
        x,
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=weight_scale[None, :],
        out_dtype=dtype,
        use_fast_accum=False,  # otherwise an H100 accumulates with 14 bits
    )


def _check(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    group_size: int | None,
) -> None:
    tensors = {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale}
    wrong = None
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        wrong = "x must be [rows, inputs] and weight [outputs, inputs]"
    elif x.dtype not in LARGEST_CODES or weight.dtype != x.dtype:
        wrong = "x and weight must be both int8 or both float8_e4m3fn"
    elif group_size is not None and x.dtype != torch.int8:
        wrong = f"group_size={group_size}, but e4m3 has a scale for a whole row"
    elif (
        x_scale.shape != scale_shape(len(x), x.shape[1], group_size)
        or weight_scale.shape != weight.shape[:1]
    ):
        each = "row" if group_size is None else f"row and {group_size} inputs"
        wrong = f"x needs a scale for each {each}, weight for each output"
    elif {x_scale.dtype, weight_scale.dtype} != {torch.float32}:
        wrong = "scales must be float32"
    elif not all(t.is_contiguous() for t in tensors.values()):
        wrong = "all must be contiguous"
    if wrong is not None:  # formatted only on error: this is called several times in every layer
        given = ", ".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"{wrong}: {given}")


# The number of rows changes from step to step and is not specialised: values of 1 or divisible by
# 16 would each recompile the kernel.
@triton.jit(do_not_specialize=["num_rows"])
def _scaled_product(
    out_ptr,  # [num_rows, OUTPUTS]
    x_ptr,  # [num_rows, INPUTS]
    x_scale_ptr,  # [num_rows], or [num_rows, GROUPS]
    weight_ptr,  # [OUTPUTS, INPUTS]
    weight_scale_ptr,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of a row, of BLOCK_K inputs each; 0: a row has one scale
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # int64: an LM head may have more than 2^31 weights, and a step that many logits.
    x_ptrs = x_ptr + m.to(tl.int64)[:, None] * INPUTS + k[None, :]
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    x_mask = (m < num_rows)[:, None] & tl.full([BLOCK_M, BLOCK_K], True, tl.int1)
    # A constant true mask costs nothing: the compiler removes it.
    weight_mask = tl.full([BLOCK_N, BLOCK_K], True, tl.int1)
    if OUTPUTS % BLOCK_N != 0:
        weight_mask &= (n < OUTPUTS)[:, None]
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=SUM if GROUPS == 0 else tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        in_row = tl.full([BLOCK_K], True, tl.int1)
        if INPUTS % BLOCK_K != 0:
            in_row = k < INPUTS - start
        x = tl.load(x_ptrs + start, mask=x_mask & in_row[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=weight_mask & in_row[None, :], other=0.0)
        if GROUPS > 0:
            group = tl.load(
                x_scale_ptr + m.to(tl.int64) * GROUPS + start // BLOCK_K,
                mask=m < num_rows,
                other=0.0,
            )
            sums = tl.dot(x, tl.trans(weight), out_dtype=tl.int32).to(tl.float32)
            # An explicit fma: otherwise the compiler decides, and tile sizes might round
            # differently.
            acc = tl.fma(sums, tl.broadcast_to(group[:, None], [BLOCK_M, BLOCK_N]), acc)
        elif tl.int32 == SUM:
            acc = tl.dot(x, tl.trans(weight), acc, out_dtype=tl.int32)
        else:  # an H100's tensor cores accumulate with 14 bits: add tiles in float32
            acc = tl.dot(x, tl.trans(weight), acc, max_num_imprecise_acc=BLOCK_K)
    out = acc.to(tl.float32)
    if GROUPS == 0:
        out *= tl.load(x_scale_ptr + m, mask=m < num_rows, other=0.0)[:, None]
    out *= tl.load(weight_scale_ptr + n, mask=n < OUTPUTS, other=0.0)[None, :]
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * OUTPUTS + n[None, :]
    mask = (m < num_rows)[:, None] & (n < OUTPUTS)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)
