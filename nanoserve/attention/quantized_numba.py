"""Attention on a CPU with numba, over a KV cache in 8 bits."""

from torch import Tensor

from nanoserve.attention.numba import NumbaAttention
from nanoserve.attention.quantized_kv import QuantizedKV, codes_and_scales
from nanoserve.attention.quantized_torch import attend_quantized_rows
from nanoserve.kernels_cpu.values import address


class QuantizedNumbaAttention(NumbaAttention):
    """The kernel for rows of few tokens reads codes where they lie: half the bytes of 16 bits."""

    _attend_rows = staticmethod(attend_quantized_rows)

    def _codes_and_scales(self, kv_cache: QuantizedKV, q: Tensor) -> tuple[Tensor, int]:
        codes_and_scales(kv_cache, q.dtype)
        return kv_cache.codes, address(kv_cache.scales)
