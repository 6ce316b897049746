"""Rotary embeddings of a part of each head, or of no part.

A table of a whole head whose last angles are zero rotates only the first pairs, and leaves the rest
of the head as it is. So every kernel that rotates whole heads can do this, too.
"""

from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rotary import RotaryEmbedding


class NoRotaryEmbedding(RotaryEmbedding):
    """Tables of angles that are all zero, for layers without positions (NoPE)."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int, context: LayerContext) -> None:
        super().__init__(rope, head_dim, length, context)
        self.cos.fill_(1)
        self.sin.zero_()
