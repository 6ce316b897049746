"""MiniCPM from its paper (Hu et al. 2024, arXiv 2404.06395, table 7), which transformers lacks.

It is transformers' Llama with three scales, put on with hooks. Positions, norms, attention and the
checkpoint's format are transformers' own.
"""

import math
from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class MiniCPMConfig(LlamaConfig):
    model_type = "minicpm"
    tie_word_embeddings: bool = True
    scale_emb: float = 1
    scale_depth: float = 1
    dim_model_base: int = 1
    sparse_config: dict | None = None


MINICPM4 = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}


class MiniCPMForCausalLM(LlamaForCausalLM):
    config_class = MiniCPMConfig

    def __init__(self, config: MiniCPMConfig) -> None:
        super().__init__(config)
        scale_after(self.model.embed_tokens, config.scale_emb)
        for layer in self.model.layers:
            for block in (layer.self_attn.o_proj, layer.mlp.down_proj):
                scale_after(block, config.scale_depth / math.sqrt(config.num_hidden_layers))
        scale_after(self.model.norm, config.dim_model_base / config.hidden_size)


def scale_after(module: nn.Module, scale: float) -> None:
    def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return out * scale

    module.register_forward_hook(hook)
