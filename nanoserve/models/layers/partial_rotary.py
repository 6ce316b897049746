"""Rotary embeddings of a part of each head, or of no part.

A table of a whole head whose last angles are zero rotates only the first pairs, and leaves the rest
of the head as it is. So every kernel that rotates whole heads can do this, too.
"""

from dataclasses import replace

import torch.nn.functional as F

from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rotary import RotaryEmbedding


class NoRotaryEmbedding(RotaryEmbedding):
    """Tables of angles that are all zero, for layers without positions (NoPE)."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int, context: LayerContext) -> None:
        super().__init__(rope, head_dim, length, context)
        self.cos.fill_(1)
        self.sin.zero_()


class PartialRotaryEmbedding(RotaryEmbedding):
    """Tables that rotate the first pairs of a head: `partial_rotary_factor` of them."""

    def __init__(self, rope: RopeConfig, head_dim: int, length: int, context: LayerContext) -> None:
        rotary_dim, whole = rope.rotary_dim(head_dim), replace(rope, partial_rotary_factor=1.0)
        super().__init__(whole, rotary_dim, length, context)
        num_still = (head_dim - rotary_dim) // 2  # pairs
        cos = F.pad(self.get_buffer("cos"), (0, num_still), value=1.0)
        self.register_buffer("cos", cos, persistent=False)
        sin = F.pad(self.get_buffer("sin"), (0, num_still))
        self.register_buffer("sin", sin, persistent=False)


def order_of_halves(head_dim: int, rotary_dim: int) -> list[int]:
    """Return where the values of a head come from, if a pair is to have one in each half.

    Before, the first `rotary_dim` values are pairs of neighbours; the others are not rotated. With
    8 and 4, it is [0, 2, 4, 5, 1, 3, 6, 7].
    """
    middle = (head_dim + rotary_dim) // 2
    first = [*range(0, rotary_dim, 2), *range(rotary_dim, middle)]
    second = [*range(1, rotary_dim, 2), *range(middle, head_dim)]
    return first + second
