"""Solution: a model of your own."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3Model


class HeronMLP(nn.Module):
    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.up_proj = ColumnParallelLinear(hidden, {"up_proj": size}, context)
        self.down_proj = RowParallelLinear(size, hidden, context)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden_size] -> the same shape."""
        return self.down_proj(torch.relu(self.up_proj(hidden)).square())


class HeronModel(Qwen3Model):
    def embed(self, input_ids: Tensor) -> Tensor:
        """int32 [num_tokens] -> [num_tokens, hidden_size]."""
        return super().embed(input_ids) * self.config.hidden_size**0.5


class HeronForCausalLM(LlamaForCausalLM):
    model_class, mlp_class = HeronModel, HeronMLP
    fused_tensors: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj")
    }
