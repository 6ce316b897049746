"""MXFP4, of the OCP Microscaling Formats specification 1.0: E2M1 values in groups of 32.

A value is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, and a sign; a group has a power of two, one byte with a
bias of 127 (E8M0). Twice the values are integers, so half the power times an integer is the weight,
exactly. Two values share a byte, the first in its low nibble. So they are in compressed-tensors'
"mxfp4-pack-quantized" and in gpt-oss' `_blocks`, of whose fused experts there is no model here.
"""

import torch
from torch import Tensor

from nanoserve.checks import require
from nanoserve.quantization.matrix import QuantizedMatrix

GROUP_SIZE = 32
_TWICE = [0, 1, 2, 3, 4, 6, 8, 12]
_CODES = torch.tensor([*_TWICE, *(-value for value in _TWICE)], dtype=torch.int8)
_NAN = 255


def mxfp4_matrix(packed: Tensor, exponents: Tensor, where: str) -> QuantizedMatrix:
    """packed: uint8 [out, in / 2]; exponents: uint8 [out, in / 32]."""
    is_number = not bool((exponents == _NAN).any())
    require(is_number, f"{where:.199} holds NaN as a scale (an exponent of {_NAN})")
    both = torch.arange(256)
    codes = _CODES[torch.stack((both & 15, both >> 4), dim=1)][packed.int()].flatten(1)
    # A scale of 2^-128 is below the least normal number, but exact.
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 128)
    return QuantizedMatrix(codes=codes, scale=scale, bits=8)
