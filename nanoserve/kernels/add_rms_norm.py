"""Residual addition and RMSNorm (Zhang and Sennrich 2019) in one pass over memory.

Apart, the two read the residual stream three times and write it twice; they do so little
arithmetic that the time is all memory traffic. Here each token's row stays in registers.
"""

import torch
import triton
import triton.language as tl

_MAX_HIDDEN = 16384  # beyond it a row no longer fits the registers of one program


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, sum): sum = residual + x, and sum / sqrt(mean(sum^2) + eps) * weight.

    x and residual: [num_tokens, hidden], contiguous, of one dtype, which both results share.
    weight: [hidden]. The sum is rounded to the dtype before it is normalised.
    """
    if x.ndim != 2 or x.shape != residual.shape or weight.shape != x.shape[1:]:
        raise ValueError(
            f"x {list(x.shape)}, residual {list(residual.shape)} and weight "
            f"{list(weight.shape)} do not fit: [num_tokens, hidden] twice, then [hidden]"
        )
    if x.dtype != residual.dtype:
        raise ValueError(f"x is {x.dtype}, but residual is {residual.dtype}")
    if not (x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x, residual and weight must be contiguous")
    num_tokens, hidden = x.shape
    if hidden > _MAX_HIDDEN:
        raise ValueError(f"hidden is {hidden}, but a program holds at most {_MAX_HIDDEN} values")
    normed, total = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    # 8 values per thread are one 16-byte load in 16 bits; 512 threads leave registers for 32.
    num_warps = min(max(block // 256, 1), 16)
    _add_rms_norm[(num_tokens,)](
        x, residual, weight, normed, total, eps, hidden, block, num_warps=num_warps
    )
    return normed, total


@triton.jit
def _add_rms_norm(
    x, residual, weight, normed, total, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):
    row_start = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    address = row_start + column
    row = tl.load(residual + address, mask=mask, other=0.0).to(tl.float32)
    row += tl.load(x + address, mask=mask, other=0.0).to(tl.float32)
    rounded = row.to(total.dtype.element_ty)
    tl.store(total + address, rounded, mask=mask)
    row = rounded.to(tl.float32)  # what the next layer will read is what counts
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / HIDDEN + eps)
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + address, (row * scale * gain).to(normed.dtype.element_ty), mask=mask)
