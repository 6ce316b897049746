"""GLM-4-0414 (Z.ai 2025): the GLM-4 before it, with a norm before and after every block."""

from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.glm import GlmForCausalLM
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.qwen3 import Qwen3DecoderLayer


class Glm4DecoderLayer(Qwen3DecoderLayer):
    def __init__(
        self, config: ModelConfig, index: int, rotary: RotaryEmbedding, context: LayerContext
    ) -> None:
        super().__init__(config, index, rotary, context)
        parts, size, eps = context.parts, config.hidden_size, config.rms_norm_eps
        self.post_self_attn_layernorm = parts.norm_class(size, eps, context)
        self.post_mlp_layernorm = parts.norm_class(size, eps, context)

    def forward(
        self, hidden: Tensor, residual: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.post_self_attn_layernorm(self.self_attn(hidden, kv_cache, metadata))
        # Despite its name, this norm is the one before the feed-forward, as in Llama.
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.post_mlp_layernorm(self.mlp(hidden)), residual


class Glm4ForCausalLM(GlmForCausalLM):
    layer_class = Glm4DecoderLayer
