"""Linear layers with integer weights and float inputs."""

import functools

import torch
from torch import Tensor

from nanoserve.kernels.cpu import checks
from nanoserve.kernels.cpu.cpu_features import converts_float16
from nanoserve.kernels.cpu.dequantized_tiles import make_product
from nanoserve.kernels.cpu.integer_linear import pack_codes, pack_scales, scale_dtype
from nanoserve.kernels.cpu.isa import KINDS
from nanoserve.kernels.cpu.packing import PANEL, unpadded

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_product = functools.cache(make_product)


class DequantizedPanels:
    """Integer weights in panels: x [..., inputs] -> [..., outputs] in x's dtype.

    The arguments are the same as for `nanoserve.kernels.cpu.integer_linear.IntegerPanels`. The
    result equals, bit for bit, the result of `FloatPanels` with the dequantized weight in float32,
    but only 4 or 8 bits per weight are read: x and sums are float32, and a row does not depend on
    other rows.
    """

    def __init__(
        self, codes: Tensor, scale: Tensor, offset: Tensor | None = None, bits: int = 8
    ) -> None:
        checks.check_codes(codes, scale, offset, bits)
        (self.outputs, self.inputs), groups = codes.shape, scale.shape[1]
        is_small = bits == 4 and KINDS["nibbles"].takes(self.inputs // groups)
        self.kind = "nibbles" if is_small else "bytes"
        self.codes = pack_codes(codes, KINDS[self.kind])
        self.scale = pack_scales(scale, scale_dtype(scale))
        self.offset = None if offset is None else pack_scales(offset, torch.float32)
        self._stored = (
            self.codes.data_ptr(),
            self.scale.data_ptr(),
            0 if self.offset is None else self.offset.data_ptr(),
            self.codes.shape[0],
            groups,
            self.codes.shape[1] // groups,
        )

    def __call__(self, x: Tensor) -> Tensor:
        checks.check_linear(x, self.inputs, tuple(_NAMES))
        rows, num_rows = x.float().contiguous(), x.numel() // self.inputs
        dtype = x.dtype if x.dtype != torch.float16 or converts_float16() else torch.float32
        out = x.new_empty(num_rows, self.codes.shape[0] * PANEL, dtype=dtype)
        _product(self.kind, _NAMES[dtype], _NAMES[self.scale.dtype], self.offset is not None)(
            rows.data_ptr(), num_rows, *self._stored, out.data_ptr(), out.stride(0) * out.itemsize
        )
        return unpadded(out, self.outputs, x)
