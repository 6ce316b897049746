"""Attention by nanoserve's own Triton kernels: the default on a GPU."""

from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.kernels.paged_attention import paged_attention


class TritonAttention(AttentionBackend):
    capturable = True

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        return paged_attention(
            q,
            kv_cache,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            metadata.block_tables,
            scale=layer.scale,
            num_decode_rows=metadata.num_decode_rows,
            max_context_len=metadata.max_context_len,
            sliding_window=layer.sliding_window,
            soft_cap=layer.soft_cap,
        )
