"""Phi-3 (Abdin et al. 2024, arXiv 2404.14219): Llama whose checkpoints have fused linears."""

from collections.abc import Mapping
from typing import ClassVar

from nanoserve.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    # Read by the loader: the name of a fused checkpoint tensor, and its parts in their order.
    fused_tensors: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
