"""Attention with flash-attn, if installed: version 3 on Hopper, version 2 on other GPUs.

FlashAttention-2 (Dao 2023) is the package flash_attn. It has two paged entry points, which share
the batch: `flash_attn_with_kvcache` gets the decode rows, `flash_attn_varlen_func` the packed rows
of several tokens. FlashAttention-3 (Shah et al. 2024) is flash_attn_interface, built from the
folder "hopper" of the same repository. There, `flash_attn_with_kvcache` accepts packed rows of any
length, and pages of any size, which `flash_attn_varlen_func` does not. It gets the rows of several
tokens, which it computes 1.4 times as fast as Triton kernels do; decode rows are as fast in either,
and Triton's kernels find their work on the GPU, where FlashAttention-3 plans it in every layer.

For blocks before a sliding window, tables contain the dummy block 0. Whether flash-attn multiplies
its V by 0 or skips it is known only from reading its source: no version has been run with blocks
that were freed. The dummy block has finite values, so nothing is added in either case.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache, KVCacheSpec

_PAGE_MULTIPLE = 256  # tokens: FlashAttention-2 reads a page in tiles, and a tile from one page
_MAX_HEAD_DIM = 256
_HOPPER = (9, 0)  # compute capability: version 3 needs features of these GPUs


def check_flash_attention(
    block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Return the version to use: "flash_attn3" or "flash_attn".

    Raises `ValueError`, which says what to do, if neither supports the configuration.
    """
    option = "attention_backend='flash_attn'"
    is_3 = _has_version_3(device)
    if not is_3 and find_spec("flash_attn") is None:
        raise ValueError(f"{option} needs the package flash-attn: pip install 'nanoserve[flash]'")
    if device.type != "cuda":
        raise ValueError(f"{option} needs an NVIDIA GPU, not device {device}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{option} needs a 16-bit dtype, not {dtype}: choose dtype='bfloat16'")
    if not is_3 and block_size % _PAGE_MULTIPLE:
        raise ValueError(
            f"{option} needs a block_size that is a multiple of {_PAGE_MULTIPLE}, not "
            f"{block_size}; 'triton' and FlashAttention-3 support any block_size"
        )
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"{option} needs a head_dim that is a multiple of 8 and at most {_MAX_HEAD_DIM}, "
            f"not {head_dim}"
        )
    return "flash_attn3" if is_3 else "flash_attn"


def _has_version_3(device: torch.device) -> bool:
    if device.type != "cuda" or find_spec("flash_attn_interface") is None:
        return False
    return torch.cuda.get_device_capability(device) == _HOPPER


class _FlashBackend(AttentionBackend):
    """The base class of both versions: decode rows and rows of several tokens are separate calls.

    Both calls get the metadata of the whole batch.
    """

    capturable = True

    def kv_cache_spec(
        self,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> KVCacheSpec:
        """Return the layout of the cache: see `AttentionBackend`.

        flash-attn supports K and V only in the dtype of the queries; others raise `ValueError`.
        """
        if kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype={kv_cache_dtype!r} and attention_backend='flash_attn': flash-attn "
                f"has no scales per token and head; choose 'torch', 'numba' or 'triton'"
            )
        return super().kv_cache_spec(block_size, num_kv_heads, head_dim, dtype)

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        num_decode_rows = metadata.num_decode_rows
        parts = []
        if num_decode_rows:
            decode = q[:num_decode_rows]
            parts.append(self.attend_decode_rows(layer, decode, kv_cache, metadata))
        if num_decode_rows < metadata.num_rows:
            chunks = q[num_decode_rows:]
            parts.append(self.attend_chunks(layer, chunks, kv_cache, metadata))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend_decode_rows(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute attention of q [num_decode_rows, num_heads, head_dim]; return the same shape."""
        raise NotImplementedError

    def attend_chunks(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute attention of the tokens after the decode rows; return the shape of q."""
        raise NotImplementedError


class FlashAttention3(_FlashBackend):
    """The backend of FlashAttention-3: it computes rows of several tokens, Triton decode rows.

    According to its source, tiles of keys need not begin where a page does, so a tile in which a
    window begins may include pages before the window and multiply their V by 0: finite values do no
    harm, NaN would.

    longest_cut, merges_in_kernel: see `TritonAttention`. A step whose rows have at most
    `longest_cut` tokens is computed by Triton alone.
    """

    def __init__(self, longest_cut: int = 1, merges_in_kernel: bool = False) -> None:
        from nanoserve.attention.triton import TritonAttention

        self._triton = TritonAttention(longest_cut, merges_in_kernel)

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        if metadata.max_query_len <= self._triton.longest_cut:
            return self._triton.attend(layer, q, kv_cache, metadata)
        return super().attend(layer, q, kv_cache, metadata)

    def attend_decode_rows(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        rows = metadata.num_decode_rows
        decode = replace(
            metadata,
            cu_seqlens_q=metadata.cu_seqlens_q[: rows + 1],
            context_lens=metadata.context_lens[:rows],
            block_tables=metadata.block_tables[:rows],
            max_query_len=1,
        )
        return self._triton.attend(layer, q, kv_cache, decode)

    def attend_chunks(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        from flash_attn_interface import flash_attn_with_kvcache

        k_cache, v_cache = _pages(kv_cache)
        cu_seqlens_q, _ = _ends_of_chunks(metadata)
        rows = slice(metadata.num_decode_rows, None)
        return flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=metadata.context_lens[rows],
            page_table=metadata.block_tables[rows],
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=metadata.max_query_len,
            **_scores(layer),
        )


class FlashAttention(_FlashBackend):
    """The backend of FlashAttention-2.

    According to its source, a tile of keys lies within a page, so all that it reads of the page in
    which a window begins belongs to the sequence.
    """

    def attend_decode_rows(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        k_cache, v_cache = _pages(kv_cache)
        rows = slice(0, metadata.num_decode_rows)
        attended = flash_attn_with_kvcache(
            q.unsqueeze(1),  # [num_rows, 1, num_heads, head_dim]
            k_cache,
            v_cache,
            cache_seqlens=metadata.context_lens[rows],
            block_table=metadata.block_tables[rows],
            **_scores(layer),
        )
        return attended.squeeze(1)

    def attend_chunks(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        from flash_attn import flash_attn_varlen_func

        k_cache, v_cache = _pages(kv_cache)
        cu_seqlens_q, cu_seqlens_k = _ends_of_chunks(metadata)
        return flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_context_len,
            block_table=metadata.block_tables[metadata.num_decode_rows :],
            **_scores(layer),
        )


def _ends_of_chunks(metadata: AttentionMetadata) -> tuple[Tensor, ...]:
    """Return (cu_seqlens_q, cu_seqlens_k) of the rows after the decode rows.

    Both are int32 [num_chunks + 1] and start at 0: cumulative lengths of queries and of contexts.
    """
    if "flash_attn" not in metadata.scratch:
        first = metadata.num_decode_rows  # also the number of tokens before the first chunk
        contexts = metadata.context_lens[first:].cumsum(0, dtype=torch.int32)
        ends = metadata.cu_seqlens_q[first:] - first, F.pad(contexts, (1, 0))
        metadata.scratch["flash_attn"] = ends
    return metadata.scratch["flash_attn"]


def _pages(kv_cache: KVCache) -> Tensor:
    """Return K and V in flash-attn's order: [num_blocks, block_size, num_kv_heads, head_dim].

    flash-attn supports strides, so these are views.
    """
    return kv_cache.values.transpose(2, 3)


def _scores(layer: AttentionLayer) -> dict[str, Any]:
    """Return flash-attn's arguments for the scale, the mask and the soft cap of the scores."""
    if layer.sinks is not None:
        raise ValueError(
            "attention_backend='flash_attn' and a layer with sinks: flash-attn has no argument for "
            "them; choose 'torch' or 'triton'"
        )
    window = layer.sliding_window
    return {
        "softmax_scale": layer.scale,
        "causal": True,
        # Number of tokens before and after a query that it attends to, -1 for all; its own is not
        # counted.
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": layer.soft_cap or 0.0,
    }
