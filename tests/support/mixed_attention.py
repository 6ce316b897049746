"""Torch's attention as a part of graphs of mixed steps, which it could not be of real ones."""

from dataclasses import replace
from typing import Any

import torch

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.torch import TorchAttention


class MixedTorchAttention(TorchAttention):
    """It looks at a step's numbers where the kernels do: in the device's buffer, when it runs.

    Of tokens that belong to no row comes NaN, as there may be in the memory that kernels leave out.
    """

    capturable = captures_mixed_steps = True

    def attend(
        self, layer: AttentionLayer, q: torch.Tensor, kv_cache: Any, metadata: AttentionMetadata
    ) -> torch.Tensor:
        if metadata.row_counts is None:
            return super().attend(layer, q, kv_cache, metadata)
        rows, num_decode_rows = metadata.row_counts.tolist()
        tokens = int(metadata.cu_seqlens_q[rows])
        step = replace(
            metadata,
            cu_seqlens_q=metadata.cu_seqlens_q[: rows + 1],
            context_lens=metadata.context_lens[:rows],
            block_tables=metadata.block_tables[:rows],
            num_decode_rows=num_decode_rows,
            max_context_len=int(metadata.context_lens[:rows].max()),
        )
        out = torch.full_like(q, torch.nan)
        out[:tokens] = super().attend(layer, q[:tokens], kv_cache, step)
        return out
