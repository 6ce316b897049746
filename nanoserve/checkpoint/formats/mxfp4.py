"""MXFP4: 4-bit floats in groups of 32 (OCP Microscaling Formats specification 1.0).

A value is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign (E2M1); the scale of a group is a power of two,
one byte with a bias of 127 (E8M0). Twice the values are integers, so a weight is exactly an integer
times half the scale. Two values share a byte, the first in the low nibble.

`quant_method` "mxfp4" is the format of gpt-oss. What an unquantized checkpoint has as one tensor of
all experts, `gate_up_proj` [experts, in, out], is stored as `gate_up_proj_blocks`, uint8 [experts,
out, in / 32, 16], and `gate_up_proj_scales`, uint8 [experts, out, in / 32].
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanoserve.checkpoint.errors import some
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.stored import StoredTensors
from nanoserve.utils.checks import require, shown

MXFP4_GROUP = 32
_TWICE_E2M1 = [0, 1, 2, 3, 4, 6, 8, 12]
E2M1_CODES = torch.tensor([*_TWICE_E2M1, *(-value for value in _TWICE_E2M1)], dtype=torch.int8)
_NAN = 255
_BLOCKS, _SCALES = "_blocks", "_scales"
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_PIECE = 2**24  # values that are unpacked at a time


class MXFP4Reader:
    """A `WeightSource` for stacks of matrices in MXFP4; all other tensors are floats."""

    def __init__(self, path: Any, config: Mapping[str, Any]) -> None:
        """Read the headers in the folder `path`, and check that each stack has both parts."""
        self._tensors = StoredTensors(path)
        headers = self._tensors.headers
        ends = (_BLOCKS, _SCALES)
        self._stacks = {
            name.removesuffix(end) for name in headers for end in ends if name.endswith(end)
        }
        unknown = [
            f"{name:.199} ({header.dtype})"
            for name, header in headers.items()
            if not name.endswith(ends) and header.dtype not in _PLAIN_DTYPES
        ]
        require(
            not unknown,
            f"tensors unknown to quant_method={shown(config.get('quant_method'))}: "
            f"{some(sorted(unknown))}",
        )
        self._shapes = {
            name: header.shape for name, header in headers.items() if not name.endswith(ends)
        }
        for name in self._stacks:
            require(name not in self._shapes, f"{name:.99} is stored both as floats and in blocks")
            self._shapes[name] = self._shape_of(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        require(name in self._shapes, f"the checkpoint has no tensor {shown(name)}")
        if not self.is_quantized(name):
            return self._tensors.read(name)
        blocks = self._tensors.read(name + _BLOCKS).flatten(2).flatten(0, 1)
        scales = self._tensors.read(name + _SCALES).flatten(0, 1)
        return mxfp4_matrix(blocks, scales, name + _SCALES)

    def is_quantized(self, name: str) -> bool:
        return name in self._stacks

    def _shape_of(self, name: str) -> tuple[int, int, int]:
        """Return the shape [experts, in, out] of an unquantized stack."""
        headers = self._tensors.headers
        for part in (_BLOCKS, _SCALES):
            require(name + part in headers, f"{name + part:.199} is missing")
            dtype = headers[name + part].dtype
            require(dtype == "U8", f"{name + part:.199} is {dtype}, not U8")
        shape, scales = headers[name + _BLOCKS].shape, headers[name + _SCALES].shape
        require(
            len(shape) == 4 and 0 not in shape and 2 * shape[-1] == MXFP4_GROUP,
            f"{name + _BLOCKS:.199} has shape {shown(list(shape))}; expected [experts, out, in / "
            f"{MXFP4_GROUP}, {MXFP4_GROUP // 2}]",
        )
        require(
            scales == shape[:3],
            f"{name + _SCALES:.199} has shape {shown(list(scales))}; expected {list(shape[:3])}",
        )
        experts, outputs, groups, _ = shape
        return experts, groups * MXFP4_GROUP, outputs


def mxfp4_matrix(packed: Tensor, exponents: Tensor, where: str) -> QuantizedMatrix:
    """Unpack MXFP4: `packed` is uint8 [out, in / 2], `exponents` uint8 [out, in / 32]."""
    is_number = not bool((exponents == _NAN).any())
    require(is_number, f"{where:.199} has NaN as a scale (exponent {_NAN})")
    both = torch.arange(256)
    pairs = E2M1_CODES[torch.stack((both & 15, both >> 4), dim=1)]
    rows, octets = packed.shape
    codes = torch.empty(rows, octets, 2, dtype=torch.int8)
    step = max(1, _PIECE // octets)
    for row in range(0, rows, step):
        codes[row : row + step] = pairs[packed[row : row + step].int()]
    # A scale of 2^-128 is subnormal in float32, but exact.
    scale = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 128)
    return QuantizedMatrix(codes=codes.flatten(1), scale=scale, bits=8)
