"""Choose the linear method, i.e. how an engine's linear layers store and multiply weights."""

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.kernels.cpu.gemm_select import choose_form
from nanoserve.kernels.cpu.torch_linear import DequantizedTiles, Form
from nanoserve.models.layers.context import LinearMethod
from nanoserve.models.quantization.cpu_method import FormLinearMethod, IntegerLinearMethod
from nanoserve.models.quantization.schemes import Scheme, scheme_of
from nanoserve.utils.checks import require

logger = logging.getLogger(__name__)


def choose_linear_method(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, num_bytes: int
) -> LinearMethod | None:
    """Return the linear method, or None if linears simply multiply by float weights.

    num_bytes: the size of the unquantized model. Raises `ValueError` for options that the
    device does not support.
    """
    dtype = getattr(torch, model_config.dtype)
    scheme = scheme_of(config, model_config)
    if device.type != "cpu" or config.attention_backend == "triton":
        return _gpu_method(config, model_config, scheme, device)
    require(
        scheme is None or not scheme.is_fp8,
        "quantization='fp8' of unquantized weights needs a GPU; on a CPU, use quantization='int8'",
    )
    choice = choose_form(dtype, num_bytes, config.batch_invariant)
    floats = FormLinearMethod(choice.make, choice.name)
    if scheme is None:
        return floats
    return IntegerLinearMethod(scheme, floats, dtype, *_integer_form(config))


def _integer_form(config: EngineConfig) -> tuple[Callable[..., Form], str]:
    """Return the form class of integer weights, and a description of its activations."""
    activations = config.quantization_activations
    has_numba = find_spec("numba") is not None
    require(
        activations != "int8" or has_numba,
        "quantization_activations='int8' needs numba on a CPU: pip install 'nanoserve[cpu]', or "
        "set it to 'none'",
    )
    if not has_numba:
        logger.info(
            "without numba, integer weights are dequantized for each matrix product; "
            "for integer products: pip install 'nanoserve[cpu]'"
        )
        return DequantizedTiles, "stay floats"
    if activations == "none":
        from nanoserve.kernels.cpu.dequantized_linear import DequantizedPanels

        return DequantizedPanels, "stay floats"
    from nanoserve.kernels.cpu.integer_linear import IntegerPanels

    return IntegerPanels, "rounded to 8 bits in groups of 32"


def _gpu_method(
    config: EngineConfig, model_config: ModelConfig, scheme: Scheme | None, device: torch.device
) -> LinearMethod | None:
    """Return the linear method for a GPU, or for a CPU that interprets the Triton kernels."""
    if scheme is None:
        return None
    activations = config.quantization_activations
    # For a checkpoint's own format, each linear is checked when it is read.
    require(
        activations != "int8" or config.quantization not in (None, "int4", "fp8"),
        f"quantization_activations='int8' on a GPU needs per-channel int8 weights, but "
        f"quantization={config.quantization!r} has others: omit the option, or set it to 'none'",
    )
    if config.quantization is None:
        logger.warning(
            "on a GPU, a quantized checkpoint is dequantized and takes as much memory as the "
            "unquantized model, unless quantization= names its format, which selects kernels that "
            "have not been measured on a GPU"
        )
        return None
    require(
        find_spec("triton") is not None,
        f"quantization={config.quantization!r} on a GPU needs the package triton",
    )
    has_e4m3_products = scheme.is_fp8 and activations is None
    if device.type == "cuda":
        # Ampere: from here on, Triton has tensor cores for bfloat16 and int8; Ada: for e4m3.
        least = (8, 9) if has_e4m3_products else (8, 0)
        found = torch.cuda.get_device_capability(device)
        require(
            found >= least,
            f"quantization={config.quantization!r} needs a GPU of compute capability "
            f"{least[0]}.{least[1]} or newer; this one has {found[0]}.{found[1]}"
            + (
                ": it can run quantization='int8', or 'fp8' with quantization_activations='none'"
                if has_e4m3_products and found >= (8, 0)
                else ""
            ),
        )
    if model_config.moe is not None and config.quantization != "int8":
        logger.warning("experts have int8 weights on a GPU, not %s", config.quantization)
    if model_config.moe is not None and activations == "int8":
        logger.warning("the activations of experts stay floats on a GPU")
    from nanoserve.models.quantization.gpu_method import QuantizedLinearMethod

    dtype = getattr(torch, model_config.dtype)
    is_dependent = KernelConfig.of(config.kernel_config).dependent_launch
    return QuantizedLinearMethod(scheme, device, dtype, activations, is_dependent)
