"""Attention with nanoserve's own Triton kernels: the default on a GPU."""

from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.kernels.triton.latent_attention import latent_attention
from nanoserve.kernels.triton.paged_attention import paged_attention
from nanoserve.kernels.triton.split_work import Arrivals


class TritonAttention(AttentionBackend):
    """A backend of Triton kernels.

    longest_cut: if no row of a step has more tokens, the keys of its rows are split into shares, as
    in decode rows.
    merges_in_kernel: merge the partial results of split rows in the kernel that computes them. All
    steps must then be launched on one stream.
    batch_invariant: use kernels in which a token's result does not depend on the other tokens of
    its row and its step.
    """

    capturable = captures_mixed_steps = supports_value_dim = supports_sinks = True

    def __init__(
        self,
        longest_cut: int = 1,
        merges_in_kernel: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.longest_cut, self.merges_in_kernel = longest_cut, merges_in_kernel
        self.batch_invariant = batch_invariant
        self.captures_mixed_steps = not batch_invariant
        self._arrivals = Arrivals()

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        if layer.value_dim is not None:
            return self._attend_latents(layer, q, kv_cache, metadata)
        is_cut = metadata.max_query_len <= self.longest_cut
        return paged_attention(
            q,
            kv_cache.values,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            metadata.block_tables,
            scale=layer.scale,
            num_decode_rows=metadata.num_decode_rows,
            row_counts=metadata.row_counts,
            max_context_len=metadata.max_context_len,
            max_query_len=metadata.max_query_len if is_cut else None,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
            sinks=layer.sinks,
            kv_scales=kv_cache.scales,
            arrivals=self._arrivals.on(q.device) if self.merges_in_kernel else None,
            in_order=self.batch_invariant,
        )

    def _attend_latents(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        others = layer.sliding_window, layer.soft_cap, layer.sinks
        if any(one is not None for one in others):
            raise ValueError(
                f"TritonAttention supports value_dim={layer.value_dim} neither with "
                f"sliding_window={layer.sliding_window} nor with soft_cap={layer.soft_cap} nor "
                f"with sinks"
            )
        return latent_attention(
            q,
            kv_cache.values,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            metadata.block_tables,
            scale=layer.scale,
            value_dim=layer.value_dim,
            max_context_len=metadata.max_context_len,
            k_scales=kv_cache.scales,
            row_counts=metadata.row_counts,
        )
