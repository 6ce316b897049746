"""The 8-bit KV cache stores codes, and a scale for every token and head.

    value = code x scale        scale = largest magnitude of the head's values / largest code

The largest value of each head and token is represented exactly by a code, so no calibration is
needed, and no value is clipped. int8 has 255 even steps: the error is at most half a scale. e4m3,
fp8 with 4 bits of exponent and 3 of mantissa (Micikevicius et al. 2022, arXiv 2209.05433), has an
error of at most a sixteenth of the value, or 2^-10 of a scale: better for values much smaller than
the largest, worse for all others.

With head_dim=128, a head takes 132 bytes with its 4-byte scale, and 256 bytes in a 16-bit cache. So
the same pool holds 1.94 times as many tokens.
"""

import torch
from torch import Tensor

LARGEST_CODE = {torch.int8: 127.0, torch.uint8: 448.0}
# A head of zeros gets it, too, so that no division is by 0. Some GPUs flush smaller numbers to 0.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of x [..., head_dim], of the same shape and in this dtype, and scales [...].

    dtype: int8, or uint8 for the bits of e4m3. The computation is in float32 for any dtype of x.
    Codes cannot be infinite or NaN. If a value is, the scale of its head becomes NaN, and so does
    the whole head, so that the request ends with an error and not with wrong tokens.
    """
    x = x.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    is_finite = largest.isfinite()
    scales = (largest / LARGEST_CODE[dtype]).clamp(min=SMALLEST_SCALE)
    values = torch.where(is_finite, x / scales, 0)
    if dtype == torch.int8:
        codes = values.round().to(torch.int8)  # halves to even, as in all kernels
    else:
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales.masked_fill(~is_finite, torch.nan).squeeze(-1)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of codes [..., head_dim] with scales [...]: float32 [..., head_dim]."""
    values = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return values.float() * scales.unsqueeze(-1)
