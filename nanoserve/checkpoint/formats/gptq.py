"""GPTQ checkpoints of AutoGPTQ, GPTQModel and transformers (Frantar et al., 2022).

A linear is `qweight`, int32 [in x bits / 32, out], packed along its inputs; `qzeros`, int32
[groups, out x bits / 32], packed along its outputs; `scales` [groups, out]; and `g_idx`, int32
[in], the group of each input, which is unordered after act-order (`desc_act`).

There are two conventions for zero points, distinguished by `checkpoint_format`: "gptq_v2" stores
them unchanged, "gptq" stores them minus 1. The 1 was subtracted from whole words, so it is added to
whole words here, as in GPTQModel: a zero point of 0 has borrowed from the adjacent one.

A wrong label cannot be detected in an asymmetric file. In a symmetric one, all zero points must be
in the middle of the range; if they are off by one, the label is wrong, and the weights are
rejected: with shifted weights, a model would generate garbage without an error.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.packed import (
    affine_matrix,
    group_of_input,
    num_groups,
    unpack_int32,
)
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.reader import Reader


class GPTQReader(Reader):
    marks = ("qweight",)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def layout(self, module: str) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
        bits, size = self.config["bits"], self.config.get("group_size", 128)
        words, out = self.matrix_header(module, "qweight", "I32")
        num_inputs = words * 32 // bits
        groups = num_groups(num_inputs, size)
        wanted: dict[str, tuple[int, ...]] = {
            "qweight": (words, out),
            "qzeros": (groups, -(-out * bits // 32)),
            "scales": (groups, out),
        }
        self.matrix_header(module, "qzeros", "I32")
        self.matrix_header(module, "scales", "F16", "BF16", "F32")
        if self.config.get("desc_act") or self.has(module, "g_idx"):
            wanted["g_idx"] = (num_inputs,)
            self.check_dtype(module, "g_idx", "I32", "I64")
        return (out, num_inputs), wanted

    def weight(self, module: str) -> QuantizedMatrix:
        bits, size = self.config["bits"], self.config.get("group_size", 128)
        codes = unpack_int32(self.part(module, "qweight").T, bits)
        g_idx = self.part(module, "g_idx") if self.has(module, "g_idx") else None
        return affine_matrix(
            codes,
            self._zeros(module, len(codes)),
            self.part(module, "scales").T,
            bits,
            group_of_input(codes.shape[1], size, g_idx, f"{module}.g_idx"),
        )

    def _zeros(self, module: str, out: int) -> Tensor:
        """Return the zero points, uint8 [out, groups]."""
        bits, words = self.config["bits"], self.part(module, "qzeros")
        is_v2 = stores_whole_zeros(self.config)
        ones = sum(1 << shift for shift in range(0, 32, bits))
        # In 64 bits, of which the lower 32 are kept: 32-bit addition would overflow.
        corrected = words if is_v2 else (words.long() + ones).to(torch.int32)
        zeros = unpack_int32(corrected, bits)[:, :out]
        half = 2 ** (bits - 1)
        shift = 1 if is_v2 else -1  # difference from the other convention
        if self.config.get("sym", True) and bool((zeros == half - shift).all()):
            label = "gptq" if is_v2 else "gptq_v2"
            raise ValueError(
                f"all zero points of {module:.99} are {half - shift}, but sym=True implies {half}: "
                f"set checkpoint_format to {label!r} in the quantization_config of config.json"
            )
        return zeros.T


def stores_whole_zeros(config: Mapping[str, Any]) -> bool:
    """Return True if zero points are stored unchanged, and not minus 1."""
    return "gptq_v2" in (config.get("checkpoint_format"), config.get("format"))
