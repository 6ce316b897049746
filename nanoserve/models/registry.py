"""The registry that maps architecture names in `config.json` to the classes of models.

To add your own model, register its class, or the place to import the class from. The engine calls
`cls(model_config, layer_context)`. See `nanoserve.models.qwen3` for the interface:

    from nanoserve.models.llama import LlamaForCausalLM
    from nanoserve.models.registry import register_model

    class MyForCausalLM(LlamaForCausalLM):
        mlp_class = MyMLP

    register_model("MyForCausalLM", MyForCausalLM)
    llm = LLM("path/to/a/checkpoint/whose/config/says/MyForCausalLM")
"""

import torch
from torch import nn

from nanoserve.checkpoint.model_config import FOR_POOLING, THROUGH_TRANSFORMERS, ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.utils.registry import Registry

MODELS: Registry[type[nn.Module]] = Registry(
    "architecture",
    {
        "DeepseekV2ForCausalLM": "nanoserve.models.deepseek_v2:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": "nanoserve.models.deepseek_v3:DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM": "nanoserve.models.gemma2:Gemma2ForCausalLM",
        "Gemma3ForCausalLM": "nanoserve.models.gemma3:Gemma3ForCausalLM",
        "Glm4ForCausalLM": "nanoserve.models.glm4:Glm4ForCausalLM",
        "GlmForCausalLM": "nanoserve.models.glm:GlmForCausalLM",
        "GptOssForCausalLM": "nanoserve.models.gpt_oss:GptOssForCausalLM",
        "GraniteForCausalLM": "nanoserve.models.granite:GraniteForCausalLM",
        "LlamaForCausalLM": "nanoserve.models.llama:LlamaForCausalLM",
        "MiniCPMForCausalLM": "nanoserve.models.minicpm:MiniCPMForCausalLM",
        "MistralForCausalLM": "nanoserve.models.llama:LlamaForCausalLM",
        "MixtralForCausalLM": "nanoserve.models.mixtral:MixtralForCausalLM",
        "Olmo2ForCausalLM": "nanoserve.models.olmo2:Olmo2ForCausalLM",
        "Phi3ForCausalLM": "nanoserve.models.phi3:Phi3ForCausalLM",
        "Qwen2ForCausalLM": "nanoserve.models.qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "nanoserve.models.qwen2_moe:Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM": "nanoserve.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "nanoserve.models.qwen3_moe:Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM": "nanoserve.models.qwen3_next:Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM": "nanoserve.models.qwen3_5:Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM": "nanoserve.models.qwen3_5:Qwen3_5ForCausalLM",
        "SmolLM3ForCausalLM": "nanoserve.models.smollm3:SmolLM3ForCausalLM",
        THROUGH_TRANSFORMERS: "nanoserve.models.transformers.model:TransformersForCausalLM",
        FOR_POOLING: "nanoserve.models.pooling:PoolingModel",
    },
)


def register_model(architecture: str, model: str | type[nn.Module]) -> None:
    """Register a model: a class, or "package.module:Class", which is imported on first use.

    With tensor parallelism the other ranks import the class, so it must not be in `__main__`.
    Raises `ValueError` for an architecture that is already registered and for a malformed name.
    """
    MODELS.register(architecture, model)


def supported_architectures() -> list[str]:
    """Return the names of the architectures with a class of their own, in alphabetical order."""
    return sorted(set(MODELS.names()) - {THROUGH_TRANSFORMERS, FOR_POOLING})


def model_class(architecture: str) -> type[nn.Module]:
    """Return the class of a supported architecture."""
    return MODELS.get(architecture)


def weight_bytes(model_config: ModelConfig) -> int:
    """Return the bytes of the whole model's weights, in its dtype."""
    meta = LayerContext(getattr(torch, model_config.dtype), torch.device("meta"), num_positions=1)
    model = model_class(model_config.architecture)(model_config, meta)
    return sum(parameter.nbytes for parameter in model.parameters())
