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
    num_rows, num_kv_heads = end - first, layer.num_kv_heads
    lens = metadata.context_lens[first:end]
    shortest, length = int(lens.min()), int(lens.max())
    k, v = _gather(layer, kv_cache, metadata.block_tables[first:end], length)

    # 2) The queries: the last n tokens of each row's context. The query heads of a group share a KV
    #    head. Of one token, they are the rows of one product; of several, the KV head is repeated.
    tokens = slice(*metadata.cu_seqlens_q[[first, end]].tolist())
    n, group = (tokens.stop - tokens.start) // num_rows, layer.num_heads // num_kv_heads
    if n == 1:
        queries = q[tokens].unflatten(1, (num_kv_heads, group))
    else:
        queries = q[tokens].transpose(0, 1)[None]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))

    # 3) What a token sees. Of a whole prompt torch knows it, and skips half of the products. But of
    #    less than a vector of 16 scores that are all NaN, its quick way makes plain zeros.
    is_whole = 16 <= n == length and layer.sliding_window is layer.soft_cap is None
    visible = None if is_whole else _visible(lens, n, length, layer.sliding_window)
    if shortest < length:
        _clear_ends(k, v, lens, shortest)

    # 4) Attention itself.
    if layer.soft_cap is None:
        attended = F.scaled_dot_product_attention(
            queries, k, v, visible, is_causal=is_whole, scale=layer.scale
        )
    else:
        attended = _capped_attention(layer, queries, k, v, visible)
    return attended.flatten(1, 2) if n == 1 else attended[0].transpose(0, 1)


def _gather(
    layer: AttentionLayer, kv_cache: Tensor, block_tables: Tensor, length: int
) -> tuple[Tensor, Tensor]:
    """Return K and V of some rows, up to the longest: [num_rows, num_kv_heads, length, head_dim].

    The heads of a block follow each other in the cache, so that one index finds a head of a block.
    """
    num_kv_heads, block_size = layer.num_kv_heads, kv_cache.shape[3]
    blocks = block_tables[:, None, : -(-length // block_size)].long()
    index = blocks * num_kv_heads + torch.arange(num_kv_heads, device=blocks.device)[:, None]
    heads = (cache.flatten(0, 1).index_select(0, index.flatten()) for cache in kv_cache)
    shape = (len(block_tables), num_kv_heads, -1, layer.head_dim)
    k, v = (head.view(shape)[:, :, :length] for head in heads)
    return k, v


def _clear_ends(k: Tensor, v: Tensor, lens: Tensor, shortest: int) -> None:
    """Write zeros behind each row's end: there may be another's, even NaN, and 0 x NaN is NaN."""
    slots = torch.arange(shortest, k.shape[2], device=k.device)
    for x in (k, v):
        x[:, :, shortest:].masked_fill_((slots >= lens[:, None])[:, None, :, None], 0)


def _capped_attention(
    layer: AttentionLayer, queries: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> Tensor:
    """Attention whose scores pass through a soft cap (Gemma 2): cap x tanh(score / cap)."""
    # Scaled before the product: in float16, unscaled scores could overflow.
    scores = (queries * layer.scale @ k.mT).float() / layer.soft_cap
    scores = (layer.soft_cap * scores.tanh()).masked_fill(~visible, -torch.inf)
    return scores.softmax(dim=-1).to(v.dtype) @ v


def _visible(lens: Tensor, n: int, length: int, window: int | None) -> Tensor:
    """bool [num_rows, 1, n, length]: of each row's last n tokens, which slots they look at.

    A token sees itself and what came before it, within a window if the layer has one.
    """
    slots = torch.arange(length, dtype=lens.dtype, device=lens.device)
    positions = lens[:, None] - n + slots[:n]
    distance = positions[:, None, :, None] - slots
    return (distance >= 0) & (distance < (window or length))
