"""A toy architecture of a user's own: Llama whose feed-forward is twice as loud."""

import torch

from nanoserve.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from nanoserve.models.qwen3 import Qwen3MLP


class LoudMLP(Qwen3MLP):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


class LoudDecoderLayer(LlamaDecoderLayer):
    mlp_class = LoudMLP


class LoudModel(LlamaModel):
    layer_class = LoudDecoderLayer


class LoudForCausalLM(LlamaForCausalLM):
    model_class = LoudModel
