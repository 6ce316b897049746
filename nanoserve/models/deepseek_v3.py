"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437): DeepSeek-V2 with another router.

Its experts are chosen by a sigmoid and a bias, which balances their load without a loss of its own.
Checkpoints may have layers for multi-token prediction behind the others; these are not read.
"""

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV2MoE
from nanoserve.models.layers.context import LayerContext


class DeepseekV3MoE(DeepseekV2MoE):
    topk_methods = ("noaux_tc",)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    moe_class = DeepseekV3MoE

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        first, count = config.num_hidden_layers, config.num_nextn_predict_layers
        # Read by the loader: beginnings of the names of tensors that the model has no use for.
        self.unused_tensors = tuple(f"model.layers.{first + i}." for i in range(count))
