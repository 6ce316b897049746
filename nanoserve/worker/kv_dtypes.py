"""Which attention backend keeps K and V in which type; see `nanoserve.attention.quantized_kv`."""

import logging
from importlib import import_module
from typing import Any

from nanoserve.attention.interface import AttentionBackend
from nanoserve.layers.ops import TorchOps

logger = logging.getLogger(__name__)

# Attention, and the small operations that go with it, of which one stores K and V.
_QUANTIZED = {
    "torch": (
        "nanoserve.attention.quantized_torch:QuantizedTorchAttention",
        "nanoserve.attention.quantized_torch:QuantizedTorchOps",
    ),
    "numba": (
        "nanoserve.attention.quantized_numba:QuantizedNumbaAttention",
        "nanoserve.kernels_cpu.quantized_kv:QuantizedNumbaOps",
    ),
    # These kernels take a cache of either kind.
    "triton": ("nanoserve.attention.triton:TritonAttention", "nanoserve.kernels.ops:TritonOps"),
}


def quantized_backend(
    name: str, kv_cache_dtype: str, **options: Any
) -> tuple[AttentionBackend, TorchOps]:
    """Of the backend `name`, what works on a cache in `kv_cache_dtype`, which is not "auto".

    Raises `ValueError` for flash-attn, which keeps K and V in the type of the queries.
    """
    if name not in _QUANTIZED:
        raise ValueError(
            f"kv_cache_dtype={kv_cache_dtype!r} and attention_backend='flash_attn': flash-attn "
            f"knows no scale per token and head; {list(_QUANTIZED)} do"
        )
    places = [location.split(":") for location in _QUANTIZED[name]]
    attention, ops = (getattr(import_module(module), kind) for module, kind in places)
    attention, ops = attention(**options), ops()
    attention.kv_cache_dtype = kv_cache_dtype
    logger.info("KV cache in %s, with a scale per token and head", kv_cache_dtype)
    return attention, ops
