"""Attention on a CPU with numba (extra: `nanoserve[cpu]`): its own kernel for decode rows."""

import math
from typing import Any

import torch
from numba import config, get_num_threads, set_num_threads
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.torch import attend_rows
from nanoserve.kernels_cpu.attention import attend_decode
from nanoserve.kernels_cpu.values import ELEMENTS, address


class NumbaAttention(AttentionBackend):
    """A kernel of its own for rows of one token; torch, as in `TorchAttention`, for longer ones."""

    def __init__(self) -> None:
        num_threads = torch.get_num_threads()
        set_num_threads(min(num_threads, config.NUMBA_NUM_THREADS))
        # This has started numba's threads, which sets the number of OpenMP's, torch's too, to all.
        torch.set_num_threads(num_threads)

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        q = q.contiguous()
        out = torch.empty_like(q)
        rows = metadata.num_decode_rows
        if rows:
            tables = metadata.block_tables
            cache, scales = self._codes_and_scales(kv_cache)
            attend_decode(
                (*map(address, (q, out, tables, metadata.context_lens, cache)), scales),
                (rows, layer.num_heads, tables.shape[1], *cache.shape[1:]),
                layer.scale,
                layer.sliding_window or 2**31 - 1,
                layer.soft_cap or 0.0,
                # Threads share every row as evenly as its heads allow.
                math.gcd(layer.num_kv_heads, get_num_threads()),
                ELEMENTS[q.dtype],
                ELEMENTS[cache.dtype],
            )
        if rows < q.shape[0]:  # there are longer rows, too
            chunks = range(rows, metadata.num_rows)
            attend = self._attend_rows
            parts = [attend(layer, q, kv_cache, metadata, row, row + 1) for row in chunks]
            torch.cat(parts, out=out[rows:])
        return out

    # What another kind of cache has other answers to.
    _attend_rows = staticmethod(attend_rows)

    def _codes_and_scales(self, kv_cache: Any) -> tuple[Tensor, int]:
        """What K and V are kept as, and the address of their scales if they have any."""
        return kv_cache, 0
