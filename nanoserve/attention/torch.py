"""Paged attention in plain torch: what the kernels are checked against, and runs without them.

The blocks of a row are gathered into contiguous K and V; the rest is attention as in a textbook.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata

# Rows of one token are attended together, padded to the longest: as many as keep the gathered copy
# of a KV head about inside the processor's cache.
_SLOTS_AT_ONCE = 8192


class TorchAttention(AttentionBackend):
    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        out = torch.empty_like(q)
        rows_at_once = max(1, _SLOTS_AT_ONCE // metadata.max_context_len)
        for first in range(0, metadata.num_decode_rows, rows_at_once):
            end = min(first + rows_at_once, metadata.num_decode_rows)
            _attend_rows(layer, q, kv_cache, metadata, first, end, out)
        self.attend_chunks(layer, q, kv_cache, metadata, out)
        return out

    def attend_chunks(
        self,
        layer: AttentionLayer,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
    ) -> None:
        """Rows of several tokens, one after the other: a large product each."""
        for row in range(metadata.num_decode_rows, metadata.num_rows):
            _attend_rows(layer, q, kv_cache, metadata, row, row + 1, out)


def _attend_rows(
    layer: AttentionLayer,
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    first: int,
    end: int,
    out: Tensor,
) -> None:
    """softmax(q k^T scale) v for rows [first, end), which have the same number n of tokens."""
    # 1) K and V of each row, in order: [num_rows, num_kv_heads, length, head_dim].
    lens = metadata.context_lens[first:end]
    length, block_size = int(lens.max()), kv_cache.shape[3]
    blocks = metadata.block_tables[first:end, : -(-length // block_size)].long()
    k, v = (cache[blocks].transpose(1, 2).flatten(2, 3)[:, :, :length] for cache in kv_cache)

    # 2) The queries, [num_rows, num_heads, n, head_dim]: the last tokens of each row's context.
    tokens = slice(*metadata.cu_seqlens_q[[first, end]].tolist())
    queries = q[tokens].unflatten(0, (end - first, -1)).transpose(1, 2)
    n = queries.shape[2]
    positions = lens[:, None] - n + torch.arange(n, device=q.device)

    # 3) A token sees itself and what came before it, within a window if the layer has one.
    distance = positions[:, :, None] - torch.arange(
        length, device=q.device
    )  # [num_rows, n, length]
    visible = ((distance >= 0) & (distance < (layer.sliding_window or length)))[:, None]
    # What no query sees may be another sequence's, even NaN, and 0 x NaN is NaN.
    unseen = ~visible.any(dim=2).unsqueeze(-1)
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)

    # 4) Attention itself.
    if layer.soft_cap is None:
        attended = F.scaled_dot_product_attention(
            queries, k, v, attn_mask=visible, scale=layer.scale, enable_gqa=True
        )
    else:
        k, v = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1) for x in (k, v))
        # Scaled before the product: in float16, unscaled scores could overflow.
        scores = (queries * layer.scale @ k.mT).float() / layer.soft_cap
        scores = (layer.soft_cap * scores.tanh()).masked_fill(~visible, -torch.inf)
        attended = scores.softmax(dim=-1).to(v.dtype) @ v
    out[tokens] = attended.transpose(1, 2).flatten(0, 1)
