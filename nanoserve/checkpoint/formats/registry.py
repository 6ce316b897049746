"""What of quantisation is found by name: formats of checkpoints, and what is made of plain weights.

It imports no torch: names are checked before there is an engine. The ranks of a model are other
processes, which have only what is registered where they import it.
"""

from collections.abc import Callable
from typing import Any

from nanoserve.utils.registry import Registry

_FORMATS = "nanoserve.checkpoint.formats"
_SCHEMES = "nanoserve.models.quantization.schemes"
# By the `quant_method` of config.json: what opens such a checkpoint, (folder or file,
# quantization_config) -> a `nanoserve.checkpoint.formats.source.WeightSource`. A format of your own
# checks its `quantization_config` itself.
FORMATS: Registry[Callable[..., Any]] = Registry(
    "quant_method",
    {
        "compressed-tensors": f"{_FORMATS}.compressed_tensors:CompressedTensorsReader",
        "fp8": f"{_FORMATS}.fp8:FP8Reader",
        "awq": f"{_FORMATS}.awq:AWQReader",
        "gptq": f"{_FORMATS}.gptq:GPTQReader",
        "bitsandbytes": f"{_FORMATS}.bitsandbytes:open_bitsandbytes",
        "gguf": "nanoserve.checkpoint.gguf.source:open_gguf",
    },
)
# By the option `quantization`: a `nanoserve.models.quantization.schemes.Scheme`.
SCHEMES: Registry[Any] = Registry(
    "quantization",
    {"int8": f"{_SCHEMES}:INT8", "int4": f"{_SCHEMES}:INT4", "fp8": f"{_SCHEMES}:FP8"},
)


def quantization_names() -> list[str]:
    """Return what `quantization` may be: a scheme, or the name of the checkpoint's own format."""
    return list(dict.fromkeys([*SCHEMES.names(), *FORMATS.names()]))
