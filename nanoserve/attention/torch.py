"""Paged attention in plain torch: what the kernels are checked against, and runs without them.

The blocks of a row are gathered into contiguous K and V; the rest is attention as in a textbook.
"""

from itertools import pairwise

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
        rows_at_once = max(1, _SLOTS_AT_ONCE // metadata.max_context_len)
        decodes = metadata.num_decode_rows
        # Longer rows go alone, each a large product. [0, 2, 4, 5, 6, 7]: two, two and one of the
        # rows of one token, then two longer ones.
        borders = [*range(0, decodes, rows_at_once), *range(decodes, metadata.num_rows + 1)]
        parts = [attend_rows(layer, q, kv_cache, metadata, *rows) for rows in pairwise(borders)]
        return torch.cat(parts)


def attend_rows(
    layer: AttentionLayer,
    q: Tensor,
    kv_cache: Tensor,
    metadata: AttentionMetadata,
    first: int,
    end: int,
) -> Tensor:
    """softmax(q k^T scale) v for rows [first, end), which have the same number n of tokens.

    q is the whole batch's; what is returned is [num_rows x n, num_heads, head_dim].
    """
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
    #    `distance` is [num_rows, n, length]; `visible` is the same for all heads.
    distance = positions[:, :, None] - torch.arange(length, device=q.device)
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
    return attended.transpose(1, 2).flatten(0, 1)
