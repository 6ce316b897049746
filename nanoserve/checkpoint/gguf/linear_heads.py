"""The heads of linear attention in GGUF files: sizes, and the order of value heads.

In safetensors checkpoints, the value heads that read a key head are consecutive. Files of Qwen3.5
have the first value head of every key head, then the second of each, and so on, because llama.cpp
repeats keys as a whole. Files of Qwen3-Next keep the order, but have beta and the decay, which the
model stores by key heads, in one tensor.
"""

from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix, reorder_rows
from nanoserve.checkpoint.gguf.linear_settings import linear_settings
from nanoserve.checkpoint.gguf.settings import Settings
from nanoserve.utils.checks import require

BOTH_GATES = "linear_attn.in_proj_ba"
_ONE_ROW_PER_HEAD = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")


class LinearHeads(NamedTuple):
    """The numbers and sizes of heads. is_tiled: value heads have Qwen3.5's order in the file."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    is_tiled: bool

    @classmethod
    def of(cls, settings: Settings) -> "LinearHeads":
        """Read the settings. Raises `ValueError` for those that are missing or contradictory."""
        raw = linear_settings(settings, num_layers=0)
        return cls(
            num_keys=raw["linear_num_key_heads"],
            num_values=raw["linear_num_value_heads"],
            key_dim=raw["linear_key_head_dim"],
            value_dim=raw["linear_value_head_dim"],
            is_tiled=settings.name != "qwen3next",
        )

    def gate_rows(self, num_rows: int) -> dict[str, Tensor]:
        """Return the rows of beta and of the decay in `BOTH_GATES`, by the model's names."""
        problem = f"ssm_ba has {num_rows} rows, but {self.num_values} value heads need two each"
        require(num_rows == 2 * self.num_values, problem)
        rows = torch.arange(2 * self.num_values).view(self.num_keys, 2, -1)
        names = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
        return {name: rows[:, i].flatten() for i, name in enumerate(names)}

    def restore(self, name: str, values: Tensor | QuantizedMatrix) -> Tensor | QuantizedMatrix:
        """Return a tensor of `linear_attn` as the model's checkpoint has it."""
        if name.endswith("A_log") and isinstance(values, Tensor):  # stored as -exp(A_log)
            values = (-values.float()).log()
        if self.is_tiled:
            values = self._in_order(name, values)
        if name.endswith("conv1d.weight") and isinstance(values, Tensor):
            return values.unsqueeze(1)
        return values

    def _in_order(self, name: str, values: Tensor | QuantizedMatrix) -> Tensor | QuantizedMatrix:
        if name.endswith(_ONE_ROW_PER_HEAD):
            return reorder_rows(values, self._order(1))
        if name.endswith("in_proj_z.weight"):
            return reorder_rows(values, self._order(self.value_dim))
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            first = 2 * self.num_keys * self.key_dim
            order = torch.cat((torch.arange(first), first + self._order(self.value_dim)))
            return reorder_rows(values, order)
        if name.endswith("out_proj.weight"):
            return _columns(values, self._order(self.value_dim), self.value_dim)
        return values

    def _order(self, size: int) -> Tensor:
        """Return the places in the file of all numbers of the value heads, `size` of each head."""
        heads = torch.arange(self.num_values).view(-1, self.num_keys).T.reshape(-1, 1)
        return (heads * size + torch.arange(size)).flatten()


def _columns(
    values: Tensor | QuantizedMatrix, order: Tensor, head: int
) -> Tensor | QuantizedMatrix:
    """Return the inputs `order`, which has whole heads of `head` inputs."""
    if isinstance(values, Tensor):
        return values[:, order]
    size = gcd(head, values.group_size)  # of groups that no head shares
    groups = (order[::head, None] // size + torch.arange(head // size)).flatten()
    scale, offset = (
        None if x is None else x.repeat_interleave(values.group_size // size, dim=1)[:, groups]
        for x in (values.scale, values.offset)
    )
    return replace(values, codes=values.codes[:, order], scale=scale, offset=offset)
