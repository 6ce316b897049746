"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023; Grattafiori et al. 2024): Qwen3 without head norms.

Historically Llama came first, but the annotated model here is Qwen3, and the other files have only
the differences from it.
"""

from nanoserve.models.qwen3 import Qwen3ForCausalLM


class LlamaForCausalLM(Qwen3ForCausalLM):
    has_head_norms = False
