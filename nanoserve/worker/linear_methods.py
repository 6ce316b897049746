"""How the linears of an engine keep and use their weights."""

import logging
from importlib.util import find_spec

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checks import require
from nanoserve.config import EngineConfig
from nanoserve.kernels_cpu.float_choice import choose_form
from nanoserve.kernels_cpu.linear_method import FormLinearMethod
from nanoserve.layers.context import LinearMethod
from nanoserve.quantization.schemes import scheme_of

logger = logging.getLogger(__name__)


def choose_linear_method(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, num_bytes: int
) -> LinearMethod | None:
    """`num_bytes` are the plain model's. Raises `ValueError` for what cannot run here.

    None keeps plain weights.
    """
    dtype = getattr(torch, model_config.dtype)
    scheme = scheme_of(config, model_config)
    if device.type != "cpu":
        if scheme is not None and scheme.bits is not None:
            raise ValueError(
                f"quantization={config.quantization!r} runs on a CPU only, not on {device}"
            )
        if scheme is not None:
            logger.warning("on a GPU, a quantised checkpoint takes the memory of a plain one")
        return None
    floats = FormLinearMethod(choose_form(dtype, num_bytes).make)
    if scheme is None:
        return floats
    require(
        find_spec("numba") is not None,
        "integer weights need numba on a CPU: pip install 'nanoserve[cpu]'",
    )
    from nanoserve.kernels_cpu.integer_method import IntegerLinearMethod

    return IntegerLinearMethod(scheme, floats, dtype)
