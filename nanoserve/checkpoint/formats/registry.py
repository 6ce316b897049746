"""Registries of checkpoint formats, and of schemes that quantize unquantized weights.

This module does not import torch: names are checked before an engine is built. The ranks of a model
are separate processes, so a registration must be in a module that they import as well.
"""

from collections.abc import Callable
from typing import Any

from nanoserve.utils.registry import Registry

_FORMATS = "nanoserve.checkpoint.formats"
_SCHEMES = "nanoserve.models.quantization.schemes"
# `quant_method` of config.json -> function that opens such a checkpoint: (folder or file,
# quantization_config) -> a `nanoserve.checkpoint.formats.source.WeightSource`. A user's own format
# must check its `quantization_config` itself.
FORMATS: Registry[Callable[..., Any]] = Registry(
    "quant_method",
    {
        "compressed-tensors": f"{_FORMATS}.compressed_tensors:CompressedTensorsReader",
        "fp8": f"{_FORMATS}.fp8:FP8Reader",
        "awq": f"{_FORMATS}.awq:AWQReader",
        "gptq": f"{_FORMATS}.gptq:GPTQReader",
        "mxfp4": f"{_FORMATS}.mxfp4:MXFP4Reader",
        "bitsandbytes": f"{_FORMATS}.bitsandbytes:open_bitsandbytes",
        "gguf": "nanoserve.checkpoint.gguf.source:open_gguf",
    },
)
# Value of the option `quantization` -> a `nanoserve.models.quantization.schemes.Scheme`.
SCHEMES: Registry[Any] = Registry(
    "quantization",
    {"int8": f"{_SCHEMES}:INT8", "int4": f"{_SCHEMES}:INT4", "fp8": f"{_SCHEMES}:FP8"},
)


def quantization_names() -> list[str]:
    """Return the values of `quantization`: schemes, and names of checkpoint formats."""
    return list(dict.fromkeys([*SCHEMES.names(), *FORMATS.names()]))
