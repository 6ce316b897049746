"""Rotary position embedding (Su et al. 2021): a token's position is an angle.

Pairs (x[i], x[i + d/2]) of a query or key are rotated by position x theta^(-2i/d), so that the dot
product of a query and a key depends only on the distance between their positions. Types that extend
the context use other frequencies: `nanoserve.models.layers.rope_scaling`.
"""

import torch
from torch import nn

from nanoserve.checkpoint.rope_config import RopeConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.rope_scaling import inverse_frequencies


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin of the angles of positions, [num_positions, head_dim / 2] each.

    `length` is the model's limit, in tokens. The context may limit the table to fewer positions,
    and may have the sequence length that frequencies are computed for, `max_model_len`.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, length: int, context: LayerContext) -> None:
        super().__init__()
        rope.check_whole()
        # Angles are always float32: at position 40,000, neighbours are equal in bfloat16.
        inv_freq, scale = 1 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
        if rope.rope_type != "default":
            inv_freq, scale = inverse_frequencies(rope, head_dim, context.max_model_len or length)
        angles = torch.outer(torch.arange(context.num_positions or length).float(), inv_freq)
        where = (context.device, context.dtype)
        self.register_buffer("cos", (angles.cos() * scale).to(*where), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(*where), persistent=False)
