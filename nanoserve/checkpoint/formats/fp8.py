"""FP8 checkpoints: with a scale per block (DeepSeek, Qwen), per tensor or per output.

A linear is `weight`, float8_e4m3fn [out, in], and its scale. This is `weight_scale_inv`, float32
[out / 128, in / 128] rounded up, which is a factor in spite of its name (DeepSeek-V3 technical
report, section 3.3, and its `weight_dequant`), or `weight_scale`, one number or one per output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.reader import Reader
from nanoserve.utils.checks import require, shown

_SCALES = ("weight_scale_inv", "weight_scale")


class FP8Reader(Reader):
    marks = _SCALES
    parts = ("weight", *_SCALES)

    def layout(self, module: str) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
        shape = self.matrix_header(module, "weight", "F8_E4M3")
        part = self._scale_part(module)
        block = self.config.get("weight_block_size")
        found, dtype = self.header(module, part).shape, self.header(module, part).dtype
        check_scale(shape, found, block, f"{module}.{part}")
        is_known = dtype in ("F32", "BF16", "F16", "F8_E8M0") or (
            dtype == "U8" and self.config.get("scale_fmt") == "ue8m0"
        )
        require(is_known, f"{module:.99}.{part} is {dtype}, which is not a data type of scales")
        return shape, {"weight": shape, part: found}

    def weight(self, module: str) -> Tensor:
        scale = self.part(module, self._scale_part(module))
        if scale.dtype == torch.uint8:  # E8M0, stored with the type of bytes
            scale = scale.view(torch.float8_e8m0fnu)
        block = self.config.get("weight_block_size")
        return dequantize_fp8(self.part(module, "weight"), scale, block)

    def _scale_part(self, module: str) -> str:
        return next(name for name in _SCALES if self.has(module, name))


def check_scale(
    shape: tuple[int, int], scale: tuple[int, ...], block: Sequence[int] | None, where: str
) -> None:
    """Check that `scale` is the shape of one scale per block, or else per tensor or output."""
    out, num_inputs = shape
    wanted = [(), (1,), (1, 1), (out,), (out, 1)]
    if block is not None:
        wanted = [(-(-out // block[0]), -(-num_inputs // block[1]))]
    require(
        scale in wanted,
        f"{where:.199} is {shown(list(scale))}: for a weight {list(shape)} with blocks of {block}, "
        f"it must be {' or '.join(str(list(one)) for one in wanted)}",
    )


def dequantize_fp8(weight: Tensor, scale: Tensor, block: Sequence[int] | None) -> Tensor:
    """Return float32 [out, in]: each value times the scale of its block, output or tensor."""
    result, scale = weight.float(), scale.float()
    if block is None:
        return result.mul_(scale.reshape(-1, 1))
    rows, columns = block
    for first, row in enumerate(scale):  # by row, so that scales are not expanded to all weights
        per_input = row.repeat_interleave(columns)[: result.shape[1]]
        result[first * rows : (first + 1) * rows] *= per_input
    return result
