"""How the linears of an engine keep and use their weights."""

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.kernels_cpu.float_choice import choose_form
from nanoserve.kernels_cpu.linear_method import FormLinearMethod
from nanoserve.layers.context import LinearMethod
from nanoserve.quantization.schemes import scheme_of


def choose_linear_method(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, num_bytes: int
) -> LinearMethod:
    """`num_bytes` are the plain model's. Raises `ValueError` for what cannot run here."""
    dtype = getattr(torch, model_config.dtype)
    if device.type != "cpu":
        raise ValueError(
            f"quantization={config.quantization!r} runs on a CPU only, not on {device}"
        )
    floats = FormLinearMethod(choose_form(dtype, num_bytes).make)
    scheme = scheme_of(config, model_config)
    if scheme is None:
        return floats
    from nanoserve.kernels_cpu.integer_method import IntegerLinearMethod

    return IntegerLinearMethod(scheme, floats, dtype)
