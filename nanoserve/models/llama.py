"""Llama 2, 3, 3.1 and 3.2 (Touvron et al. 2023; Grattafiori et al. 2024): Qwen3 without head norms.

The lineage runs the other way, but the annotated model is Qwen3, and a file here says what differs.
"""

from nanoserve.models.qwen3 import Qwen3ForCausalLM


class LlamaForCausalLM(Qwen3ForCausalLM):
    has_head_norms = False
