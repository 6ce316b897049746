"""SmolLM3 (Hugging Face 2025): Llama without rotary positions in every fourth layer.

In such a layer (NoPE, Kazemnejad et al. 2023, arXiv 2305.19466) the only order is that a token sees
no later ones. It helps with long contexts, and the other layers have positions (RNoPE, Yang et al.
2025, arXiv 2501.18795).
"""

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.partial_rotary import NoRotaryEmbedding
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.llama import LlamaForCausalLM
from nanoserve.models.qwen3 import Qwen3Model


class SmolLM3Model(Qwen3Model):
    def rotary_by_layer(self, config: ModelConfig, context: LayerContext) -> list[RotaryEmbedding]:
        num_positions = config.max_position_embeddings
        none = NoRotaryEmbedding(config.rope, config.head_dim, num_positions, context)
        by_layer = super().rotary_by_layer(config, context)
        return [
            none if index in config.layers_without_rope else rotary
            for index, rotary in enumerate(by_layer)
        ]


class SmolLM3ForCausalLM(LlamaForCausalLM):
    model_class = SmolLM3Model
