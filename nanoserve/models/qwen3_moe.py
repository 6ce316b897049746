"""Qwen3-MoE (Qwen team 2025, arXiv 2505.09388): Qwen3 with experts in all layers, or in some."""

from torch import nn

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.experts import SparseMoE
from nanoserve.models.qwen3 import Qwen3ForCausalLM, Qwen3MLP


def sparse_or_dense(config: ModelConfig, index: int, context: LayerContext) -> nn.Module:
    """Return the feed-forward of layer `index`."""
    is_dense = config.moe is not None and index in config.moe.dense_layers
    return (Qwen3MLP if is_dense else SparseMoE)(config, index, context)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    mlp_class = staticmethod(sparse_or_dense)  # type: ignore[assignment]  # called like a class
