"""Describe a served model in `/v1/models`, beyond the fields of OpenAI and vLLM.

The page shows these fields under "About this model". `capabilities` has Mistral's names.
"""

from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig


def describe_model(
    config: EngineConfig,
    model: ModelConfig,
    has_template: bool,
    shows_tools: bool,
    reasons: bool,
) -> dict[str, Any]:
    """Return the data types, the architecture and the capabilities of a model.

    has_template, shows_tools: True if there is a chat template, and if it shows tools to the model.
    reasons: True if reasoning is parsed and separated from the answer.
    """
    in_file = (model.quantization_config or {}).get("quant_method")
    is_same = config.kv_cache_dtype == "auto"
    return {
        "architecture": model.architecture if model.pooling is None else model.pooling.architecture,
        "dtype": model.dtype,
        "kv_cache_dtype": model.dtype if is_same else config.kv_cache_dtype,
        "quantization": config.quantization or in_file,
        "capabilities": {
            "completion_chat": has_template and model.pooling is None,
            "function_calling": shows_tools,
            "reasoning": reasons,
            "vision": False,
        },
    }
