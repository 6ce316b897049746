"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023; Grattafiori et al. 2024): Qwen3 without head norms.

The lineage runs the other way, but the annotated model is Qwen3, and a file here says what differs.
"""

from nanoserve.models.qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3Model,
)


class LlamaAttention(Qwen3Attention):
    has_head_norms = False


class LlamaDecoderLayer(Qwen3DecoderLayer):
    attention_class = LlamaAttention


class LlamaModel(Qwen3Model):
    layer_class = LlamaDecoderLayer


class LlamaForCausalLM(Qwen3ForCausalLM):
    model_class = LlamaModel
