"""A shared expert beside those of the router: every token uses it (Dai et al. 2024, DeepSeekMoE).

What all tokens need is then learnt once, instead of by each of the routed experts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.experts import SparseMoE, product
from nanoserve.models.qwen3 import Qwen3MLP


class SharedExpertMoE(SparseMoE):
    """Mixture of experts with a shared one, whose output is weighted by a gate of its own."""

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        size = config.moe.shared_expert_intermediate_size
        self.shared_expert = Qwen3MLP(replace(config, intermediate_size=size), index, context)
        self.shared_expert_gate = SigmoidGate(config, context)

    def forward(self, hidden: Tensor) -> Tensor:
        shared = self.shared_expert_gate(hidden) * self.shared_expert(hidden)
        return super().forward(hidden) + shared


class SigmoidGate(nn.Module):
    """A linear with one output, and a sigmoid: [num_tokens, hidden] -> [num_tokens, 1].

    Like a router, it is on every rank, and never quantized.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        self.router = context.empty(1, config.hidden_size)
        self.linear = context.ops.linear
        self.method: Any = context.linear_method  # an `ExpertsMethod`, or None

    def process_after_loading(self) -> None:
        if self.method is not None:
            self.method.process_router(self)

    def forward(self, hidden: Tensor) -> Tensor:
        return product(hidden, self.router, self.linear).sigmoid()

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{own_name}.weight", self.router, tuple(self.router.shape))
