"""Paged attention in plain torch: what runs on a CPU, and what the kernels are checked against.

The blocks of one KV head of one sequence are gathered into a contiguous [context, head_dim].
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata

# Decode rows are attended together, padded to the longest; this many KV slots per KV head at once
# keep the gathered copy inside the processor's cache, and bound it when one context is very long.
_SLOTS_AT_ONCE = 8192


@dataclass(frozen=True)
class _Group:
    """Rows [first, end) of a batch, with what they read."""

    first: int
    end: int
    blocks: Tensor  # [num_rows, blocks of the longest]
    distance: Tensor  # [num_rows, 1, 1, slots]: from a row's token back to each slot's

    def masked(self, window: int | None) -> Tensor:
        """bool [num_rows, 1, 1, slots]: True where a row must not look."""
        is_future = self.distance < 0
        return is_future if window is None else is_future | (self.distance >= window)


class TorchAttention(AttentionBackend):
    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        out = torch.empty_like(q)
        for group in self._decode_groups(metadata, block_size=kv_cache.shape[3]):
            rows = slice(group.first, group.end)
            out[rows] = self._attend_decode(layer, q[rows], kv_cache, group)
        if metadata.num_decode_rows < metadata.num_rows:
            self._attend_chunks(layer, q, kv_cache, metadata, out)
        return out

    def _decode_groups(self, metadata: AttentionMetadata, block_size: int) -> list[_Group]:
        if "decode_groups" not in metadata.scratch:
            groups, first = [], 0
            lens = metadata.context_lens[: metadata.num_decode_rows].tolist()
            while first < len(lens):
                end, longest = first, 0
                while end < len(lens):
                    longest_with_next = max(longest, lens[end])
                    if end > first and (end + 1 - first) * longest_with_next > _SLOTS_AT_ONCE:
                        break
                    end, longest = end + 1, longest_with_next
                groups.append(_make_group(metadata, first, end, longest, block_size))
                first = end
            metadata.scratch["decode_groups"] = groups
        return metadata.scratch["decode_groups"]

    def _attend_decode(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, group: _Group
    ) -> Tensor:
        """One token per row. The query heads that share a KV head are the rows of one product."""
        num_rows, num_kv_heads = len(q), layer.num_kv_heads
        k = _gather(kv_cache[0], group.blocks)  # [num_rows * num_kv_heads, slots, head_dim]
        v = _gather(kv_cache[1], group.blocks)
        # Scaled before the product: in float16, unscaled scores could overflow.
        q = (q * layer.scale).reshape(num_rows * num_kv_heads, -1, layer.head_dim)
        scores = _cap(torch.bmm(q, k.transpose(1, 2)).float(), layer.soft_cap)
        scores = scores.view(num_rows, num_kv_heads, -1, k.shape[1])
        masked = group.masked(layer.sliding_window)
        # What nobody sees may be another sequence's, even NaN, and 0 x NaN is NaN.
        v.view(num_rows, num_kv_heads, -1, layer.head_dim).masked_fill_(masked.mT, 0)
        weights = scores.masked_fill_(masked, -torch.inf).softmax(dim=-1)
        weights = weights.to(v.dtype).view(num_rows * num_kv_heads, -1, k.shape[1])
        return torch.bmm(weights, v).view(num_rows, layer.num_heads, layer.head_dim)

    def _attend_chunks(
        self,
        layer: AttentionLayer,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        out: Tensor,
    ) -> None:
        """Rows of several tokens, one after the other: a large product each."""
        starts, block_size = metadata.cu_seqlens_q.tolist(), kv_cache.shape[3]
        contexts = metadata.context_lens.tolist()
        for row in range(metadata.num_decode_rows, metadata.num_rows):
            tokens, context = slice(starts[row], starts[row + 1]), contexts[row]
            blocks = metadata.block_tables[row : row + 1, : -(-context // block_size)]
            k = _gather(kv_cache[0], blocks)[:, :context]
            v = _gather(kv_cache[1], blocks)[:, :context]
            q_heads = q[tokens].transpose(0, 1)  # [num_heads, n, head_dim]
            group_size = layer.num_heads // layer.num_kv_heads
            n = q_heads.shape[1]
            is_causal = n == context and layer.sliding_window is None and layer.soft_cap is None
            visible = None if is_causal else _visible(n, context, layer.sliding_window, q.device)
            if layer.soft_cap is None:
                attended = F.scaled_dot_product_attention(
                    *(q_heads[None], k[None], v[None], visible),
                    is_causal=is_causal,
                    scale=layer.scale,
                    enable_gqa=True,
                )[0]
            else:
                k, v = (x.repeat_interleave(group_size, dim=0) for x in (k, v))
                scores = _cap((q_heads * layer.scale @ k.mT).float(), layer.soft_cap)
                weights = scores.masked_fill_(~visible, -torch.inf).softmax(dim=-1)
                attended = weights.to(v.dtype) @ v
            out[tokens] = attended.transpose(0, 1)


def _visible(n: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """bool [n, context]: token i of the n last ones sees context - n + i + 1 tokens, or fewer."""
    visible = torch.ones(n, context, dtype=torch.bool, device=device).tril(context - n)
    return visible if window is None else visible.triu(context - n - window + 1)


def _cap(scores: Tensor, soft_cap: float | None) -> Tensor:
    return scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """K or V of some rows from their blocks: [num_rows * num_kv_heads, slots, head_dim]."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    heads = torch.arange(num_kv_heads, device=blocks.device)
    index = blocks[:, None, :] * num_kv_heads + heads[:, None]  # [num_rows, num_kv_heads, blocks]
    gathered = cache.view(-1, block_size * head_dim).index_select(0, index.flatten())
    return gathered.view(len(blocks) * num_kv_heads, -1, head_dim)


def _make_group(
    metadata: AttentionMetadata, first: int, end: int, longest: int, block_size: int
) -> _Group:
    num_blocks = -(-longest // block_size)
    # int64: a flat index of block, head and token may pass 2^31.
    blocks = metadata.block_tables[first:end, :num_blocks].long()
    slots = torch.arange(num_blocks * block_size, device=blocks.device)
    distance = metadata.context_lens[first:end, None] - 1 - slots
    return _Group(first, end, blocks, distance[:, None, None, :])
