"""A KV cache in 8 bits in plain torch: what the kernels are checked against."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.quantized_kv import QuantizedKV, quantize
from nanoserve.attention.torch import TorchAttention, attend_rows
from nanoserve.layers.ops import TorchOps, rotate

# Of many rows at once, the floats would take more room than the whole cache does.
_SLOTS_AT_ONCE = 8192


class QuantizedTorchAttention(TorchAttention):
    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: QuantizedKV, metadata: AttentionMetadata
    ) -> Tensor:
        # As `TorchAttention` cuts it: rows of one token together, longer ones alone.
        rows_at_once = max(1, _SLOTS_AT_ONCE // metadata.max_context_len)
        decodes = metadata.num_decode_rows
        borders = [*range(0, decodes, rows_at_once), *range(decodes, metadata.num_rows + 1)]
        parts = [attend_quantized_rows(layer, q, kv_cache, metadata, *r) for r in pairwise(borders)]
        return torch.cat(parts)


def attend_quantized_rows(
    layer: AttentionLayer,
    q: Tensor,
    kv_cache: QuantizedKV,
    metadata: AttentionMetadata,
    first: int,
    end: int,
) -> Tensor:
    """`attend_rows` over a small cache of floats: the blocks of these rows, and no others."""
    block_size = kv_cache.codes.shape[3]
    length = int(metadata.context_lens[first:end].max())
    tables = metadata.block_tables[first:end, : -(-length // block_size)].long()
    rows = replace(
        metadata,
        cu_seqlens_q=metadata.cu_seqlens_q[first : end + 1],
        context_lens=metadata.context_lens[first:end],
        block_tables=torch.arange(tables.numel(), device=q.device).view_as(tables),
    )
    floats = kv_cache.blocks(tables.flatten(), q.dtype)
    return attend_rows(layer, q, floats, rows, 0, end - first)


class QuantizedTorchOps(TorchOps):
    def norm_rotate_store(
        self,
        heads: Tensor,
        rotary: Any,
        norms: tuple[Any, Any],
        kv_cache: QuantizedKV,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Steps 2 to 5 of `Qwen3Attention.forward`, of which only the last is another."""
        num_kv_heads = kv_cache.codes.shape[2]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q_norm, k_norm = norms
        if q_norm is not None:
            q, k = q_norm(q), k_norm(k)
        cos, sin = rotary.cos[metadata.positions], rotary.sin[metadata.positions]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        store_quantized_kv(k, v, kv_cache, metadata.slot_mapping)
        return q


def store_quantized_kv(k: Tensor, v: Tensor, kv_cache: QuantizedKV, slot_mapping: Tensor) -> None:
    """K and V [num_tokens, num_kv_heads, head_dim] go to their slots, each with its scale."""
    block_size = kv_cache.codes.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    for x, codes, scales in zip((k, v), *kv_cache, strict=True):
        codes[blocks, :, offsets], scales[blocks, :, offsets] = quantize(x, codes.dtype)
