"""A toy architecture of a user's own: Llama whose feed-forward is twice as loud."""

from torch import Tensor

from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3MLP


class LoudMLP(Qwen3MLP):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


class LoudForCausalLM(LlamaForCausalLM):
    mlp_class = LoudMLP
