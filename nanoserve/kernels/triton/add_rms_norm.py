"""RMSNorm (Zhang and Sennrich 2019), usually fused with the residual addition before it.

Separately, the two operations read the residual stream three times and write it twice; they have so
little arithmetic that their time is all memory traffic. Here each token's row stays in registers.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from nanoserve.kernels.triton.dependent_launch import launch_options
from nanoserve.kernels.triton.quantized_rows import (
    CodeFormat,
    fused_codes,
    row_block,
    store_codes,
)

_MAX_HIDDEN = 16384  # a longer row does not fit into the registers of one program


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    is_dependent: bool = False,
    code_format: CodeFormat | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (normalised, sum): sum = residual + x, and sum / sqrt(mean(sum^2) + eps) * weight.

    x and residual: [num_tokens, hidden], contiguous, of one dtype, which both results share.
    weight: [hidden], of any dtype. The sum is rounded to the dtype before it is normalised.
    is_dependent: use programmatic dependent launch; the weight must be older than the kernels with
    it that are launched before. code_format: attach codes to the normalised rows.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype or not residual.is_contiguous():
        raise ValueError(
            f"x {list(x.shape)} of {x.dtype} and residual {list(residual.shape)} of "
            f"{residual.dtype} must have the same shape and dtype, and be contiguous"
        )
    total = torch.empty_like(x)
    return _launch(x, residual, weight, total, eps, is_dependent, code_format), total


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    is_dependent: bool = False,
    code_format: CodeFormat | None = None,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, of the shape and dtype of x.

    x: [num_tokens, hidden], contiguous. weight: [hidden], of any dtype.
    is_dependent, code_format: see `add_rms_norm`.
    """
    return _launch(x, None, weight, None, eps, is_dependent, code_format)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    is_dependent: bool,
    code_format: CodeFormat | None,
) -> torch.Tensor:
    shape = x.shape
    if len(shape) != 2 or weight.shape != shape[1:]:
        raise ValueError(
            f"x {list(shape)} and weight {list(weight.shape)} must be "
            f"[num_tokens, hidden] and [hidden]"
        )
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x and weight must be contiguous")
    num_tokens, hidden = shape
    if hidden > _MAX_HIDDEN:
        raise ValueError(
            f"hidden={hidden} must be at most {_MAX_HIDDEN}, which one program can hold"
        )
    normed = torch.empty_like(x)
    block, num_warps = row_block(hidden, code_format)
    _add_rms_norm[(num_tokens,)](
        x,
        residual,
        weight,
        normed,
        total,
        eps,
        hidden,
        block,
        num_warps=num_warps,
        **fused_codes(normed, code_format, block),
        **launch_options(is_dependent),
    )
    return normed


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    total,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    codes_ptr,
    scales_ptr,
    LARGEST_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    row_start = tl.program_id(0).to(tl.int64) * HIDDEN
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    if IS_DEPENDENT:
        cuda.gdc_launch_dependents()
    gain = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if IS_DEPENDENT:
        cuda.gdc_wait()
    address = row_start + column
    row = tl.load(x + address, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        row += tl.load(residual + address, mask=mask, other=0.0).to(tl.float32)
        rounded = row.to(total.dtype.element_ty)
        tl.store(total + address, rounded, mask=mask)
        row = rounded.to(tl.float32)  # normalise the rounded sum, which the next layer will read
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / HIDDEN + eps)
    result = (row * scale * gain).to(normed.dtype.element_ty)
    tl.store(normed + address, result, mask=mask)
    if codes_ptr is not None:
        token = tl.program_id(0).to(tl.int64)
        store_codes(result, codes_ptr, scales_ptr, token, HIDDEN, BLOCK, LARGEST_CODE, GROUP)
