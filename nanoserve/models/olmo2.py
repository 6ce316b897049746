"""OLMo 2 (OLMo team 2024, arXiv 2501.00656): Llama whose norms follow the blocks.

The residual stream itself enters each block, and the block's output is normalised before it is
added. Queries and keys are normalised, too, each over all heads together. Both changes keep
activations small in a long training.
"""

from torch import Tensor, nn

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.layers.sharded_norm import ShardedRMSNorm, norm_shards
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3Attention


class Olmo2Attention(Qwen3Attention):
    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__(config, index, rotary, context)
        slices, eps = self.qkv_proj.num_slices, config.rms_norm_eps
        sizes = self.qkv_proj.outputs  # of the vectors, over all ranks
        self.q_norm = ShardedRMSNorm(sizes["q_proj"], slices["q_proj"], eps, context)
        self.k_norm = ShardedRMSNorm(sizes["k_proj"], slices["k_proj"], eps, context)

    def project(self, hidden: Tensor) -> Tensor:
        heads = super().project(hidden)
        q, k, _ = heads.flatten(1).split([*self.qkv_proj.sizes.values()], dim=1)
        for x, normed in zip((q, k), norm_shards((self.q_norm, self.k_norm), (q, k)), strict=True):
            x.copy_(normed)  # q and k are views of the heads
        return heads


class Olmo2DecoderLayer(nn.Module):
    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__()
        parts, size, eps = context.parts, config.hidden_size, config.rms_norm_eps
        self.self_attn = parts.attention_class(config, index, rotary, context)
        self.mlp = parts.mlp_class(config, index, context)
        self.post_attention_layernorm = parts.norm_class(size, eps, context)
        self.post_feedforward_layernorm = parts.norm_class(size, eps, context)

    def forward(
        self, hidden: Tensor, residual: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        residual = residual + hidden
        hidden = self.self_attn(residual, kv_cache, metadata)
        residual = residual + self.post_attention_layernorm(hidden)
        return self.post_feedforward_layernorm(self.mlp(residual)), residual


class Olmo2ForCausalLM(LlamaForCausalLM):
    attention_class = Olmo2Attention
    layer_class = Olmo2DecoderLayer  # type: ignore[assignment]  # it has the same constructor
