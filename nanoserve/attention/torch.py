"""Paged attention in plain torch: the reference for the kernels, and the fallback without them.

The blocks of a row are gathered into contiguous K and V; the rest is textbook attention.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache

# Decode rows are computed together, padded to the longest: as many as keep the gathered copy of a
# KV head about within the processor's cache. The copy of an 8-bit cache is in floats: for all rows
# at once it would take more memory than the cache itself.
_SLOTS_AT_ONCE = 8192


class TorchAttention(AttentionBackend):
    supports_value_dim = supports_sinks = True

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        longest = metadata.max_context_len
        if layer.sliding_window is not None:  # plus one block, in which the window begins
            longest = min(longest, layer.sliding_window + kv_cache.values.shape[3])
        rows_at_once = max(1, _SLOTS_AT_ONCE // longest)
        decodes = metadata.num_decode_rows
        # Each longer row is computed alone, as a large matmul. [0, 2, 4, 5, 6, 7]: two, two and
        # one of the decode rows, then two longer rows.
        borders = [*range(0, decodes, rows_at_once), *range(decodes, metadata.num_rows + 1)]
        parts = [attend_rows(layer, q, kv_cache, metadata, *rows) for rows in pairwise(borders)]
        return torch.cat(parts)


def attend_rows(
    layer: AttentionLayer,
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    first: int,
    end: int,
) -> Tensor:
    """Compute softmax(q k^T scale) v for rows [first, end), which all have n tokens.

    q is the whole batch's; the result is [num_rows x n, num_heads, head_dim]. If V is a part of K,
    all of K takes its place, and the result is cut: torch's fast path needs one head size.
    """
    # 1) K and V of each row, in order: [num_rows, num_kv_heads, length, head_dim].
    num_rows, num_kv_heads = end - first, layer.num_kv_heads
    tokens = slice(*metadata.cu_seqlens_q[[first, end]].tolist())
    n, group = (tokens.stop - tokens.start) // num_rows, layer.num_heads // num_kv_heads
    k, v, lens = _gather(layer, kv_cache, metadata, slice(first, end), n, q.dtype)
    length = k.shape[2]

    # 2) The queries: the last n tokens of each row's context. The query heads of a group share a KV
    # head. For one token, they are the rows of one matmul; for several, the KV head is repeated.
    if n == 1:
        queries = q[tokens].unflatten(1, (num_kv_heads, group))
    else:
        queries = q[tokens].transpose(0, 1)[None]
        # A single KV head is repeated without a copy.
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))

    # 3) The mask. For a whole prompt, torch has a causal mode that skips half of the matmuls. But
    # if fewer than a vector of 16 scores are all NaN, torch's fast path returns zeros.
    has_neither = layer.soft_cap is None and layer.sinks is None
    is_whole = has_neither and layer.sliding_window is None and 16 <= n == length
    visible = None if is_whole else _visible(lens, n, length, layer.sliding_window)

    # 4) Attention itself.
    if has_neither:
        attended = F.scaled_dot_product_attention(
            queries, k, v, visible, is_causal=is_whole, scale=layer.scale
        )
    else:
        attended = _explicit_attention(layer, queries, k, v, visible)
    attended = attended[..., : layer.value_dim]
    return attended.flatten(1, 2) if n == 1 else attended[0].transpose(0, 1)


def _gather(
    layer: AttentionLayer,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    rows: slice,
    n: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (k, v, lens) of rows with n tokens each, up to the longest of them.

    k and v are [num_rows, num_kv_heads, length, head_dim]. With a window, a row's K and V begin
    with the first block that its first query sees; lens [num_rows] count from there.
    """
    lens, tables = metadata.context_lens[rows], metadata.block_tables[rows]
    block_size, window, starts = kv_cache.values.shape[3], layer.sliding_window, None
    if window is not None and window < metadata.max_context_len:
        starts = (lens - n + 1 - window).clamp(min=0)  # the first KV slot that is seen
        behind = starts // block_size  # blocks
        starts, lens = starts % block_size, lens - behind * block_size
    shortest, length = int(lens.min()), int(lens.max())
    num_blocks = -(-length // block_size)
    if starts is None:
        tables = tables[:, :num_blocks]
    else:
        columns = behind[:, None] + torch.arange(num_blocks, device=lens.device)
        tables = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
    blocks = kv_cache.read(tables, dtype)
    kv = blocks.transpose(2, 3).flatten(3, 4)[:, :, :, :length]  # [2, num_rows, num_kv_heads, ...]
    if shortest < length:
        slots = torch.arange(shortest, length, device=lens.device)
        _clear(kv[:, :, :, shortest:], slots >= lens[:, None])
    if starts is not None:
        slots = torch.arange(min(block_size, length), device=lens.device)
        _clear(kv[:, :, :, :block_size], slots < starts[:, None])
    return kv[0], kv[-1], lens


def _clear(kv: Tensor, is_unseen: Tensor) -> None:
    """Set to zero the KV slots of kv [2, num_rows, ..., head_dim] that no query sees.

    is_unseen: bool [num_rows, length]. These KV slots may have another sequence's K and V, even
    NaN, and 0 x NaN is NaN.
    """
    kv.masked_fill_(is_unseen[:, None, :, None], 0)


def _explicit_attention(
    layer: AttentionLayer, queries: Tensor, k: Tensor, v: Tensor, visible: Tensor
) -> Tensor:
    """Compute attention with soft-capped scores, cap x tanh(score / cap), or with sinks, or both.

    torch's function has neither. queries: [num_rows, num_kv_heads, group, head_dim], or [1,
    num_heads, n, head_dim].
    """
    # Queries are scaled before the matmul: in float16, unscaled scores could overflow.
    scores = (queries * layer.scale @ k.mT).float()
    if layer.soft_cap is not None:
        scores = layer.soft_cap * (scores / layer.soft_cap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(dim=-1)
    if layer.sinks is not None:
        # The weights of all keys together: e^lse / (e^lse + e^sink).
        sinks = layer.sinks.view(queries.shape[1], -1, 1)
        weights = weights * torch.sigmoid(scores.logsumexp(dim=-1, keepdim=True) - sinks)
    return weights.to(v.dtype) @ v


def _visible(lens: Tensor, n: int, length: int, window: int | None) -> Tensor:
    """Return the mask, bool [num_rows, 1, n, length]: the KV slots each row's last n tokens see.

    A token sees itself and the tokens before it, within a window if the layer has one.
    """
    slots = torch.arange(length, dtype=lens.dtype, device=lens.device)
    positions = lens[:, None] - n + slots[:n]
    distance = positions[:, None, :, None] - slots
    return (distance >= 0) & (distance < (window or length))
