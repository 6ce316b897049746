"""Qwen1.5-MoE and Qwen2-MoE (Qwen team 2024, arXiv 2407.10671): Qwen2 with experts.

One expert is shared by all tokens, and some layers may have a dense feed-forward.
"""

from torch import nn

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.shared_expert import SharedExpertMoE
from nanoserve.models.qwen2 import Qwen2ForCausalLM
from nanoserve.models.qwen3 import Qwen3MLP


def sparse_or_dense(config: ModelConfig, index: int, context: LayerContext) -> nn.Module:
    """Return the feed-forward of layer `index`."""
    is_dense = config.moe is not None and index in config.moe.dense_layers
    return (Qwen3MLP if is_dense else SharedExpertMoE)(config, index, context)


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    mlp_class = staticmethod(sparse_or_dense)  # type: ignore[assignment]  # called like a class
