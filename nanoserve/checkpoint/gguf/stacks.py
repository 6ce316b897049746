"""Stacks of experts: one tensor of a checkpoint is stored as one or several tensors in GGUF.

gpt-oss's `gate_up_proj` is [experts, in, 2 x size], and the outputs of gate and up alternate in it.
GGUF has gate and up apart, [experts, size, in].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix, stack_rows
from nanoserve.checkpoint.gguf.blocks import FLOATS, read_values
from nanoserve.checkpoint.gguf.container import StoredTensor
from nanoserve.utils.checks import require


class Stack(NamedTuple):
    """The stored tensors of a stack, [experts, out, in] each, or [experts, out] of a bias."""

    parts: list[StoredTensor]

    @classmethod
    def of(cls, name: str, parts: list[StoredTensor | None]) -> "Stack":
        """Check the parts of the tensor `name`; raises `ValueError` if one is missing."""
        found = [part for part in parts if part is not None]
        shapes = {part.shape for part in found}
        require(
            len(found) == len(parts) and len(shapes) == 1 and len(found[0].shape) in (2, 3),
            f"{name:.99} must have {len(parts)} tensors of equal shapes in GGUF, not "
            f"{[(part.name, list(part.shape)) for part in found]}",
        )
        return cls(found)

    @property
    def is_quantized(self) -> bool:
        return any(part.type not in FLOATS for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, *inputs = self.parts[0].shape
        return (experts, *inputs, len(self.parts) * outputs)

    def read(self) -> Tensor | QuantizedMatrix:
        """Return the tensor, or the rows [experts x out, in] of a quantized one."""
        experts, outputs, *inputs = self.parts[0].shape
        if not inputs:
            biases = [read_values(part.type, part.data()) for part in self.parts]
            return torch.stack([b for b in biases if isinstance(b, Tensor)], dim=2).flatten(1)
        flat = [part.data().reshape(experts * outputs, -1) for part in self.parts]
        values = [read_values(p.type, d) for p, d in zip(self.parts, flat, strict=True)]
        rows = stack_rows(values)
        order = torch.arange(rows.shape[0]).view(-1, experts, outputs).permute(1, 2, 0).flatten()
        if isinstance(rows, QuantizedMatrix):
            return rows.reordered(order)
        return rows[order].view(experts, -1, *inputs).mT
