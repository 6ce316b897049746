"""How the linears of an engine keep and use their weights."""

import math

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.kernels_cpu.float_choice import choose_form
from nanoserve.kernels_cpu.linear_method import FormLinearMethod
from nanoserve.layers.context import LayerContext, LinearMethod
from nanoserve.models.registry import model_class
from nanoserve.quantization.schemes import scheme_of


def choose_linear_method(
    config: EngineConfig, model_config: ModelConfig, device: torch.device
) -> LinearMethod | None:
    """None for plain weights. Raises `ValueError` for a quantization that cannot run here."""
    dtype = getattr(torch, model_config.dtype)
    if device.type != "cpu":
        raise ValueError(
            f"quantization={config.quantization!r} runs on a CPU only, not on {device}"
        )
    floats = FormLinearMethod(choose_form(dtype, _weight_bytes(model_config)).make)
    scheme = scheme_of(config, model_config)
    if scheme is None:
        return floats
    from nanoserve.kernels_cpu.integer_method import IntegerLinearMethod

    return IntegerLinearMethod(scheme, floats, dtype)


def _weight_bytes(model_config: ModelConfig) -> int:
    """Of the whole model, in its dtype."""
    context = LayerContext(device=torch.device("meta"), num_positions=1)
    model = model_class(model_config.architecture)(model_config, context)
    sizes = (math.prod(parameter.shape) for parameter in model.parameters())
    return sum(sizes) * getattr(torch, model_config.dtype).itemsize
