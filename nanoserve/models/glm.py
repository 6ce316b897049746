"""GLM-4 of 2024 (GLM team 2024, arXiv 2406.12793): Llama with RoPE in half of each head.

The pairs that RoPE rotates are neighbours in a head: (0, 1), (2, 3), and so on. Attention does not
depend on the order of a head's values, if q and k have the same. So they are put into the order of
all other models, in which a pair has one value in each half of the head.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.partial_rotary import PartialRotaryEmbedding, order_of_halves
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3Attention, Qwen3Model


class GlmAttention(Qwen3Attention):
    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__(config, index, rotary, context)
        order = order_of_halves(config.head_dim, config.rope.rotary_dim(config.head_dim))
        self.register_buffer("order", torch.tensor(order, device=context.device), persistent=False)

    def project(self, hidden: Tensor) -> Tensor:
        heads = super().project(hidden)
        rotated = heads[:, : self.layer.num_heads + self.layer.num_kv_heads]  # those of q and k
        rotated.copy_(rotated[..., self.order])
        return heads


class GlmModel(Qwen3Model):
    def rotary_by_layer(self, config: ModelConfig, context: LayerContext) -> list[RotaryEmbedding]:
        num_positions = config.max_position_embeddings
        rotary = PartialRotaryEmbedding(config.rope, config.head_dim, num_positions, context)
        return [rotary] * config.num_hidden_layers


class GlmForCausalLM(LlamaForCausalLM):
    model_class, attention_class = GlmModel, GlmAttention
    fused_tensors: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
