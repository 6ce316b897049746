"""Gate of SwiGLU and GEGLU (Shazeer 2020) in one kernel: intermediate values stay in registers.

Both activations are x sigmoid(v): v = x for SiLU. For GELU's approximation (Hendrycks and Gimpel
2016), x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3), it is v = 2 u.
"""

import torch
import triton
import triton.language as tl

from nanoserve.kernels.triton.dependent_launch import launch_options, wait_for_previous_kernel
from nanoserve.kernels.triton.quantized_rows import (
    MAX_INPUTS,
    CodeFormat,
    fused_codes,
    row_block,
    store_codes,
)

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_BLOCK = 1024  # 8 values, a 16-byte load if 16-bit, for each of the 128 threads of 4 warps


def act_and_mul(
    gate_up: torch.Tensor,
    activation: str,
    *,
    is_dependent: bool = False,
    code_format: CodeFormat | None = None,
) -> torch.Tensor:
    """Return activation(gate) * up, [num_tokens, 2 x size] -> [num_tokens, size], rounded once.

    gate_up is contiguous; the result has its dtype. activation: one of `ACTIVATIONS`.
    is_dependent: use programmatic dependent launch. code_format: attach codes to the result, if its
    rows have at most `MAX_INPUTS` values.
    """
    shape = gate_up.shape
    if len(shape) != 2 or shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate_up of shape {list(shape)} and strides {list(gate_up.stride())} must be "
            f"contiguous [num_tokens, 2 x size]"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} must be one of {ACTIVATIONS}")
    num_tokens, size = shape[0], shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    block, num_warps = _BLOCK, 4
    if size > MAX_INPUTS:
        code_format = None
    if code_format is not None:
        block, num_warps = row_block(size, code_format)
    num_blocks = -(-size // block)  # Triton's `cdiv` takes microseconds
    _act_and_mul[(num_tokens, num_blocks)](
        gate_up,
        out,
        size,
        activation,
        block,
        num_warps=num_warps,
        **fused_codes(out, code_format, block),
        **launch_options(is_dependent),
    )
    return out


@triton.jit
def _act_and_mul(
    gate_up,
    out,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    codes_ptr,
    scales_ptr,
    LARGEST_CODE: tl.constexpr,
    GROUP: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    wait_for_previous_kernel(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SIZE
    address = gate_up + token * (2 * SIZE) + column
    gate = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(address + SIZE, mask=mask, other=0.0).to(tl.float32)
    result = gated(gate, up, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + token * SIZE + column, result, mask=mask)
    if codes_ptr is not None:
        store_codes(result, codes_ptr, scales_ptr, token, SIZE, BLOCK, LARGEST_CODE, GROUP)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up, all float32."""
    v = gate
    if ACTIVATION == "gelu_pytorch_tanh":
        v = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    small = tl.exp(-tl.abs(v))  # in (0, 1], where exp(-v) could overflow
    sigmoid = tl.where(v < 0, small, 1.0) / (1.0 + small)
    return gate * sigmoid * up
