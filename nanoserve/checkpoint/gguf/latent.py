"""W_UK and W_UV of latent attention, which GGUF files store as two tensors with a matrix per head.

`nanoserve.models.layers.latent_attention` explains the matrices. In safetensors checkpoints,
`kv_b_proj` has the rows of both: for each head, those of W_UK and then those of W_UV. In GGUF files
W_UK is transposed, since llama.cpp multiplies queries by it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.gguf.blocks import read_values
from nanoserve.checkpoint.gguf.container import StoredTensor
from nanoserve.utils.checks import require

K_PART, V_PART, WHOLE = "self_attn.k_b_proj", "self_attn.v_b_proj", "self_attn.kv_b_proj"


class LatentPair(NamedTuple):
    """The place of `kv_b_proj` in a file."""

    keys: StoredTensor  # [heads, kv_lora_rank, qk_nope_head_dim]
    values: StoredTensor  # [heads, v_head_dim, kv_lora_rank]

    @property
    def tensor(self) -> StoredTensor:
        return self.keys

    @property
    def shape(self) -> tuple[int, ...]:
        num_heads, rank, key_rows = self.keys.shape
        return num_heads * (key_rows + self.values.shape[1]), rank

    @classmethod
    def of(
        cls, keys: StoredTensor, values: StoredTensor | None, whole: StoredTensor | None
    ) -> "LatentPair":
        """Return the place; raises `ValueError` unless the file has both tensors and no other.

        whole: the matrix that other files have instead.
        """
        if values is None or whole is not None:
            others = "and also attn_kv_b" if values else "but no attn_v_b"
            raise ValueError(f"{keys.file} has {keys.name}, {others}")
        shapes = (keys.shape, values.shape)
        require(
            [len(shape) for shape in shapes] == [3, 3]
            and keys.shape[:2] == (values.shape[0], values.shape[2]),
            f"{keys.file}: {keys.name} and {values.name} must be [heads, kv_lora_rank, "
            f"qk_nope_head_dim] and [heads, v_head_dim, kv_lora_rank], not {list(shapes)}",
        )
        return cls(keys, values)

    def read(self) -> Tensor:
        """Return the weight of `kv_b_proj`, dequantized: it is never multiplied with as a whole."""
        return torch.cat((_floats(self.keys).mT, _floats(self.values)), dim=1).flatten(0, 1)


def _floats(tensor: StoredTensor) -> Tensor:
    heads = [read_values(tensor.type, data) for data in tensor.data()]
    floats = [x.dequantize() if isinstance(x, QuantizedMatrix) else x.float() for x in heads]
    return torch.stack(floats)
