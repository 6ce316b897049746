"""Attention on a CPU with numba, over a KV cache in 8 bits."""

from typing import Any

from nanoserve.attention.numba import NumbaAttention
from nanoserve.attention.quantized_kv import QuantizedKV
from nanoserve.attention.quantized_torch import attend_quantized_rows


class QuantizedNumbaAttention(NumbaAttention):
    """The kernel for rows of one token reads codes where they lie: half the bytes of 16 bits."""

    _attend_rows = staticmethod(attend_quantized_rows)

    def _caches(self, kv_cache: QuantizedKV) -> tuple[Any, ...]:
        return (*kv_cache.codes.numpy(), *kv_cache.scales.numpy())
