"""Gemma 2 (Gemma team 2024, arXiv 2408.00118): Llama with a norm before and after every block.

The output of a block is normalised before it is added to the residual stream. Norms multiply by one
plus their weight, embeddings are multiplied by sqrt(hidden_size), and a tanh bounds the logits.
`ModelConfig` configures the rest in the shared layers: every other layer has a sliding window, a
tanh bounds attention scores too, and the feed-forward is GEGLU (Shazeer 2020).
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.norm import RMSNorm
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3DecoderLayer, Qwen3Model


class GemmaRMSNorm(RMSNorm):
    """RMSNorm with x / sqrt(mean(x^2) + eps) * (1 + w): a weight of zero has no effect.

    1 + w is computed once, and kept in float32: in bfloat16, 1 + 0.003 is 1. Dummy weights are 1,
    so they double the result.
    """

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__(size, eps, replace(context, dtype=torch.float32))

    def process_after_loading(self) -> None:
        self.weight.add_(1)


class Gemma2DecoderLayer(Qwen3DecoderLayer):
    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__(config, index, rotary, context)
        parts, size, eps = context.parts, config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = parts.norm_class(size, eps, context)
        self.post_feedforward_layernorm = parts.norm_class(size, eps, context)

    def forward(
        self, hidden: Tensor, residual: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, kv_cache, metadata)
        hidden = self.post_attention_layernorm(hidden)
        hidden, residual = self.pre_feedforward_layernorm.add(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(hidden)), residual


class Gemma2Model(Qwen3Model):
    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        # Rounded to the dtype of the weights: in bfloat16, sqrt(3584) = 59.87 becomes 59.75.
        self.scale = torch.tensor(config.hidden_size**0.5, dtype=context.dtype).item()

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.scale


class Gemma2ForCausalLM(LlamaForCausalLM):
    model_class, layer_class, norm_class = Gemma2Model, Gemma2DecoderLayer, GemmaRMSNorm

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        logits, soft_cap = super().compute_logits(hidden), self.config.logits_soft_cap
        if logits is None or soft_cap is None:
            return logits
        # In place: with a vocabulary of 256,000, copies are large.
        return logits.div_(soft_cap).tanh_().mul_(soft_cap)
