"""Attention by the flash-attn package (Dao 2023, FlashAttention-2), where it is installed.

Its two paged entry points share the batch between them: `flash_attn_with_kvcache` takes the rows
of one token, `flash_attn_varlen_func` the packed rows of several.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata

_PAGE_MULTIPLE = 256  # tokens: FlashAttention-2 reads a page in tiles, and a tile from one page
_MAX_HEAD_DIM = 256


def check_flash_attention(
    block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `ValueError`, with the number and what to do, if flash-attn cannot serve this."""
    asked = "attention_backend='flash_attn'"
    if find_spec("flash_attn") is None:
        raise ValueError(f"{asked} needs the package flash-attn: pip install 'nanoserve[flash]'")
    if device.type != "cuda":
        raise ValueError(f"{asked} needs an NVIDIA GPU, not device {device}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{asked} works in 16 bits, not {dtype}: choose dtype='bfloat16'")
    if block_size % _PAGE_MULTIPLE:
        raise ValueError(
            f"{asked} needs a block_size that is a multiple of {_PAGE_MULTIPLE}, not {block_size}; "
            f"'triton' takes any"
        )
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"{asked} needs a head_dim that is a multiple of 8 and at most {_MAX_HEAD_DIM}, "
            f"not {head_dim}"
        )


class FlashAttention(AttentionBackend):
    capturable = True

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        # flash-attn's pages are [num_blocks, block_size, num_kv_heads, head_dim]; it reads
        # strides, so a view will do.
        k_cache, v_cache = kv_cache.transpose(2, 3)
        num_decode_rows = metadata.num_decode_rows
        parts = []
        if num_decode_rows:
            decode = q[:num_decode_rows]
            parts.append(_attend_decode(layer, decode, k_cache, v_cache, metadata))
        if num_decode_rows < metadata.num_rows:
            chunks = q[num_decode_rows:]
            parts.append(_attend_chunks(layer, chunks, k_cache, v_cache, metadata))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_decode(
    layer: AttentionLayer, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    from flash_attn import flash_attn_with_kvcache

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


def _attend_chunks(
    layer: AttentionLayer, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    # Both cumulative lengths have to begin at 0 again, behind the decode rows.
    first = metadata.num_decode_rows
    cu_seqlens_q, cu_seqlens_k = metadata.cu_seqlens_q[first:], _cu_seqlens_k(metadata)[first:]
    return flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q - cu_seqlens_q[0],
        cu_seqlens_k=cu_seqlens_k - cu_seqlens_k[0],
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_context_len,
        block_table=metadata.block_tables[first:],
        **_scores(layer),
    )


def _cu_seqlens_k(metadata: AttentionMetadata) -> Tensor:
    """int32 [num_rows + 1]: where each row's context would begin and end, laid side by side."""
    if not hasattr(metadata, "cu_seqlens_k"):  # the first layer leaves it there for the others
        ends = metadata.context_lens.cumsum(0, dtype=torch.int32)
        metadata.cu_seqlens_k = F.pad(ends, (1, 0))
    return metadata.cu_seqlens_k


def _scores(layer: AttentionLayer) -> dict[str, Any]:
    """flash-attn's arguments for the scale, the mask and the cap of the scores."""
    window = layer.sliding_window
    return {
        "softmax_scale": layer.scale,
        "causal": True,
        # Tokens seen before a query and after it, -1 for all; its own is not counted.
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "softcap": layer.soft_cap or 0.0,
    }
