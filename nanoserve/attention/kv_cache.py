"""The paged KV cache of a layer, in floating point or 8-bit: layout, writes and reads.

K and V are stored in blocks of `block_size` tokens. A token's location is its *KV slot*: its
block's number x block_size + offset. The head dimension precedes the token dimension, so what one
head reads of a block is contiguous.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.attention.quantized_kv import dequantize, quantize
from nanoserve.checkpoint.kv_formats import head_bytes, kv_format


@dataclass(frozen=True)
class KVCacheSpec:
    """The layout of a layer's cache on one rank."""

    block_size: int  # tokens
    num_kv_heads: int  # of this rank
    head_dim: int
    dtype: torch.dtype  # of values, or of codes
    has_scales: bool = False  # True for codes, which have a scale for every token and head
    num_stored: int = 2  # K and V; 1 if V is a part of K

    @classmethod
    def of_format(
        cls,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> "KVCacheSpec":
        """Return the layout for a `kv_cache_dtype`; `dtype` is the model's."""
        kind = kv_format(kv_cache_dtype, str(dtype).removeprefix("torch."))
        dtype, has_scales = getattr(torch, kind.dtype), kind.has_scales
        return cls(block_size, num_kv_heads, head_dim, dtype, has_scales)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: K, V and their scales."""
        per_head = head_bytes(self.head_dim, self.dtype.itemsize, self.has_scales)
        return self.num_stored * self.num_kv_heads * self.block_size * per_head

    @property
    def cache_key(self) -> str:
        """Name of the format, part of the key of cached blocks: formats store different K and V."""
        name = str(self.dtype).removeprefix("torch.")
        return "fp8_e4m3" if self.has_scales and name == "uint8" else name

    def allocate(
        self, num_layers: int, num_blocks: int, zeros: Callable[..., Tensor] = torch.zeros
    ) -> list["KVCache"]:
        """Allocate the caches of several layers as one contiguous piece of memory.

        num_blocks: including dummy block 0. `zeros(shape, dtype=dtype)` allocates the memory.
        """
        of_block = (self.num_kv_heads, self.block_size, self.head_dim)
        shape = (num_layers, self.num_stored, num_blocks, *of_block)
        values = zeros(shape, dtype=self.dtype)
        if not self.has_scales:
            return [KVCache(layer) for layer in values]
        scales = zeros(shape[:-1], dtype=torch.float32)
        return [KVCache(*layer) for layer in zip(values, scales, strict=True)]


@dataclass(frozen=True, eq=False, slots=True)
class KVCache:
    """The KV cache of one layer: K, and behind it V, unless V is a part of K."""

    values: Tensor  # or codes: [num_stored, num_blocks, num_kv_heads, block_size, head_dim]
    scales: Tensor | None = None  # float32 [num_stored, num_blocks, num_kv_heads, block_size]
    group: int = 0  # the index of the layer's `KVCacheGroup`

    def store(self, k: Tensor, v: Tensor | None, slot_mapping: Tensor) -> None:
        """Write K and V [num_tokens, num_kv_heads, head_dim] to the KV slots [num_tokens].

        v: None if it is a part of K.
        """
        block_size = self.values.shape[3]
        blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
        for index, x in enumerate((k,) if v is None else (k, v)):
            if self.scales is not None:
                x, self.scales[index][blocks, :, offsets] = quantize(x, self.values.dtype)
            self.values[index][blocks, :, offsets] = x

    def read(self, block_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return blocks: [num_stored, ..., n, num_kv_heads, block_size, head_dim], in `dtype`.

        block_ids: [..., n]. In memory, the heads precede the n blocks: a head's tokens are
        contiguous.
        """
        num_stored, num_blocks, num_kv_heads = self.values.shape[:3]
        heads = torch.arange(num_kv_heads, device=block_ids.device)[:, None]
        of_k = block_ids.long().unsqueeze(-2) * num_kv_heads + heads  # [..., num_kv_heads, n]
        index = torch.stack([of_k + i * num_blocks * num_kv_heads for i in range(num_stored)])
        blocks = self.values.flatten(0, 2).index_select(0, index.flatten())
        if self.scales is not None:
            scales = self.scales.flatten(0, 2).index_select(0, index.flatten())
            blocks = dequantize(blocks, scales).to(dtype)
        return blocks.view(*index.shape, *blocks.shape[1:]).transpose(-3, -4)

    def fill_(self, value: float) -> None:
        """Set all of K and V to `value`."""
        if self.scales is None:
            self.values.fill_(value)
            return
        codes, scales = quantize(torch.full((1,), value), self.values.dtype)
        self.values.fill_(codes.item())
        self.scales.fill_(scales.item())
