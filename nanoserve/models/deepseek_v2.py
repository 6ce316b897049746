"""DeepSeek-V2 (DeepSeek-AI 2024, arXiv 2405.04434): latent attention, and shared experts.

The first layers are dense. In the others, a token is computed by its routed experts and by experts
that all tokens share, which together are one feed-forward. `nanoserve.models.layers` has the parts:
`latent_attention` and `grouped_routing`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.experts import SparseMoE
from nanoserve.models.layers.grouped_routing import choose_experts
from nanoserve.models.layers.latent_attention import LatentAttention
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3MLP, Qwen3Model
from nanoserve.utils.checks import check_choice


class DeepseekV2MoE(SparseMoE):
    """Routed experts, chosen in float32, and the shared experts."""

    rounds_weights, router_dtype = False, torch.float32
    topk_methods: tuple[str, ...] = ("greedy", "group_limited_greedy")

    def __init__(self, config: ModelConfig, index: int, context: LayerContext) -> None:
        super().__init__(config, index, context)
        moe = self.moe = config.moe
        check_choice("topk_method", moe.routing.topk_method, self.topk_methods)
        self.bias = None
        if moe.routing.topk_method == "noaux_tc":
            self.bias = replace(context, dtype=torch.float32).empty(moe.num_experts)
        self.shared_experts = None
        size = moe.shared_expert_intermediate_size  # of all of them: together they are one
        if size is not None:
            self.shared_experts = Qwen3MLP(replace(config, intermediate_size=size), index, context)

    def forward(self, hidden: Tensor) -> Tensor:
        routed = super().forward(hidden)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden.float() @ self.router.T
        return choose_experts(
            logits, self.bias, self.moe.routing, self.top_k, self.moe.norm_topk_prob
        )

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield from super().checkpoint_tensors(own_name)
        if self.bias is not None:
            name = f"{own_name}.gate.e_score_correction_bias"
            yield CheckpointTensor(name, self.bias, tuple(self.bias.shape))


class DeepseekV2Model(Qwen3Model):
    def rotary_by_layer(self, config: ModelConfig, context: LayerContext) -> list[RotaryEmbedding]:
        num_positions, rotated = config.max_position_embeddings, config.mla.qk_rope_head_dim
        rotary = RotaryEmbedding(config.rope, rotated, num_positions, context)
        return [rotary] * config.num_hidden_layers


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    model_class, attention_class = DeepseekV2Model, LatentAttention  # type: ignore[assignment]
    moe_class = DeepseekV2MoE

    @classmethod
    def mlp_class(  # type: ignore[override]  # called like a class
        cls, config: ModelConfig, index: int, context: LayerContext
    ) -> nn.Module:
        """Return the feed-forward of layer `index`."""
        is_dense = config.moe is None or index in config.moe.dense_layers
        return (Qwen3MLP if is_dense else cls.moe_class)(config, index, context)
