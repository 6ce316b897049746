"""Granite 3 (Granite team 2024): MiniCPM, with other names of its scales in `config.json`.

`ModelConfig` reads them: embeddings are multiplied by `embedding_multiplier`, the outputs of blocks
by `residual_multiplier`, attention scores by `attention_multiplier` in place of 1 / sqrt(head_dim),
and logits are divided by `logits_scaling`.
"""

from nanoserve.models.minicpm import MiniCPMForCausalLM


class GraniteForCausalLM(MiniCPMForCausalLM):
    pass
