"""Qwen3.5 and its mixtures of experts (Qwen team 2026), the text models.

Qwen3-Next whose checkpoints store the projections of linear attention in other tensors.
"""

from nanoserve.models.layers.gated_delta_net import GatedDeltaNet
from nanoserve.models.qwen3_next import Qwen3NextForCausalLM


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):  # its name in config.json
    linear_attention_class = GatedDeltaNet
