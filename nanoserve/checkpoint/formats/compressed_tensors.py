"""compressed-tensors: the format of llm-compressor and of most checkpoints made for vLLM.

A linear is `weight` in int8 or float8, or `weight_packed`, and `weight_scale`: one number,
[out, 1], [out, groups] or one per block; asymmetric ones have a `weight_zero_point`. Packed codes
are unsigned (2^(bits - 1) is added), int32 [out, in x bits / 32], the lowest bits first, and rows
are padded: `weight_shape` is the original shape. Zero points are packed along the outputs.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.fp8 import check_scale, dequantize_fp8
from nanoserve.checkpoint.formats.mxfp4 import MXFP4_GROUP, mxfp4_matrix
from nanoserve.checkpoint.formats.packed import (
    affine_matrix,
    group_of_input,
    num_groups,
    unpack_int32,
)
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.reader import Reader
from nanoserve.checkpoint.formats.schemes import Scheme, read_schemes, scheme_of
from nanoserve.utils.checks import require, shown

_Layout = tuple[tuple[int, int], dict[str, tuple[int, ...]]]


class CompressedTensorsReader(Reader):
    marks = ("weight_scale",)
    parts = (
        "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx",
    )  # fmt: skip
    optional = ("weight_zero_point",)  # some releases store zeros for symmetric weights, too

    def __init__(self, path: Path, config: dict) -> None:
        self._groups = read_schemes(config)
        super().__init__(path, config)

    def layout(self, module: str) -> _Layout:
        scheme = scheme_of(module, self.config, self._groups)
        if scheme.format == "mxfp4-pack-quantized":
            out, octets = self.matrix_header(module, "weight_packed", "U8")
            self.check_dtype(module, "weight_scale", "U8")
            is_whole = octets * 2 % MXFP4_GROUP == 0
            require(
                is_whole,
                f"{module:.99}: {octets * 2} inputs cannot be divided into groups of {MXFP4_GROUP}",
            )
            parts: dict[str, tuple[int, ...]] = {
                "weight_packed": (out, octets),
                "weight_scale": (out, octets * 2 // MXFP4_GROUP),
            }
            return (out, octets * 2), parts
        self.check_dtype(module, "weight_scale", "F32", "BF16", "F16")
        if scheme.type == "float":
            shape = self.matrix_header(module, "weight", "F8_E4M3")
            found = self.header(module, "weight_scale").shape
            check_scale(shape, found, scheme.block, f"{module}.weight_scale")
            return shape, {"weight": shape, "weight_scale": found}
        if scheme.format != "pack-quantized":
            shape = self.matrix_header(module, "weight", "I8")
            return shape, {"weight": shape} | self._integer_parts(module, scheme, shape)
        shape = self._packed_shape(module)
        words = -(-shape[1] * scheme.num_bits // 32)
        self.matrix_header(module, "weight_packed", "I32")
        parts = {"weight_packed": (shape[0], words), "weight_shape": (2,)}
        return shape, parts | self._integer_parts(module, scheme, shape)

    def weight(self, module: str) -> Tensor | QuantizedMatrix:
        scheme = scheme_of(module, self.config, self._groups)
        scale = self.part(module, "weight_scale")
        if scheme.format == "mxfp4-pack-quantized":
            return mxfp4_matrix(self.part(module, "weight_packed"), scale, f"{module}.weight_scale")
        if scheme.type == "float":
            return dequantize_fp8(self.part(module, "weight"), scale, scheme.block)
        out, num_inputs = self._shapes[f"{module}.weight"]
        if scheme.format == "pack-quantized":
            codes = unpack_int32(self.part(module, "weight_packed"), scheme.num_bits)
            codes = codes[:, :num_inputs]
        else:
            codes = _unsigned(self.part(module, "weight"), scheme.num_bits, f"{module}.weight")
        scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
        scale = scale.expand(out, -1)
        return affine_matrix(
            codes,
            self._zeros(module, scheme, (out, scale.shape[1])),
            scale,
            scheme.num_bits,
            group_of_input(num_inputs, scheme.group_size, self._g_idx(module, scheme), module),
        )

    def _integer_parts(
        self, module: str, scheme: Scheme, shape: tuple[int, int]
    ) -> dict[str, tuple[int, ...]]:
        out, groups = shape[0], num_groups(shape[1], scheme.group_size)
        scale = self.header(module, "weight_scale").shape
        wanted: dict[str, tuple[int, ...]] = {"weight_scale": (out, groups)}
        if scheme.strategy == "tensor":
            check_scale(shape, scale, None, f"{module}.weight_scale")
            wanted = {"weight_scale": scale}
        if not scheme.symmetric:
            # Older releases do not pack zero points.
            dtypes = ("I8", "I32") if scheme.format == "pack-quantized" else ("I8",)
            self.check_dtype(module, "weight_zero_point", *dtypes)
            is_packed = self.header(module, "weight_zero_point").dtype == "I32"
            per_word = 32 // scheme.num_bits
            wanted["weight_zero_point"] = (-(-out // per_word), groups) if is_packed else scale
        if scheme.has_g_idx:
            self.check_dtype(module, "weight_g_idx", "I32", "I64")
            wanted["weight_g_idx"] = (shape[1],)
        return wanted

    def _packed_shape(self, module: str) -> tuple[int, int]:
        """Return the shape in `weight_shape`: a row may end within a word."""
        header = self.header(module, "weight_shape")
        is_pair = header.shape == (2,) and header.dtype in ("I64", "I32")
        found = f"{module:.99}.weight_shape is {header.dtype} {shown(list(header.shape))}"
        require(is_pair, f"{found}, not two integers")
        out, num_inputs = self.part(module, "weight_shape").tolist()
        require(
            min(out, num_inputs) > 0,
            f"{module:.99}.weight_shape={[out, num_inputs]} must be two positive sizes",
        )
        return out, num_inputs

    def _zeros(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Tensor:
        """Return the zero points, uint8 [out, groups]."""
        name = "weight_zero_point"
        zeros: Any = self.part(module, name) if self.has(module, name) else None
        if scheme.symmetric:
            is_zero = zeros is None or not bool(zeros.any())
            require(is_zero, f"{module:.99}.{name} is not 0, but the config has symmetric=true")
            return torch.full(shape, 2 ** (scheme.num_bits - 1), dtype=torch.uint8)
        if zeros.dtype == torch.int32:
            return unpack_int32(zeros.T, scheme.num_bits)[:, : shape[0]].T
        zeros = zeros.reshape(-1, 1) if zeros.dim() < 2 else zeros
        return _unsigned(zeros, scheme.num_bits, f"{module}.{name}").expand(shape)

    def _g_idx(self, module: str, scheme: Scheme) -> Tensor | None:
        return self.part(module, "weight_g_idx") if scheme.has_g_idx else None


def _unsigned(codes: Tensor, bits: int, where: str) -> Tensor:
    """Convert int8 codes around 0 to uint8 codes around 2^(bits - 1)."""
    result = codes.view(torch.uint8) + 2 ** (bits - 1)  # wraps around, as intended
    is_in_range = bits == 8 or int(result.max()) < 2**bits
    require(is_in_range, f"{where:.199} has codes with more than {bits} bits")
    return result
