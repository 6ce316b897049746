"""An attention backend of one's own, which attends to nothing: only the last token counts."""

import torch

from nanoserve.attention.interface import AttentionBackend


class BlindAttention(AttentionBackend):
    def attend(self, layer, q: torch.Tensor, kv_cache, metadata) -> torch.Tensor:
        return torch.zeros_like(q)
