"""Gemma 3, the text model (Gemma team 2025, arXiv 2503.19786): Gemma 2 with a norm on every head.

The head norms replace the soft caps. Most layers have a sliding window and the RoPE of a short
context. All other layers have a RoPE for 128 Ki tokens.
"""

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.gemma2 import Gemma2ForCausalLM, Gemma2Model
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rotary import RotaryEmbedding


class Gemma3Model(Gemma2Model):
    def rotary_by_layer(self, config: ModelConfig, context: LayerContext) -> list[RotaryEmbedding]:
        num_positions = config.max_position_embeddings
        rope = config.local_rope or config.rope  # a user's model may have one for all layers
        local = RotaryEmbedding(rope, config.head_dim, num_positions, context)
        by_layer = super().rotary_by_layer(config, context)
        windows = zip(by_layer, config.sliding_windows, strict=True)
        return [rotary if window is None else local for rotary, window in windows]


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    model_class = Gemma3Model
    has_head_norms = True
