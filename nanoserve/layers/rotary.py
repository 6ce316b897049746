"""Rotary position embedding (Su et al. 2021): a token's position is an angle.

Pairs (x[i], x[i + d/2]) of a query or key are turned by position x theta^(-2i/d), so that the
dot product of a query and a key depends on the distance of their positions alone.
"""

import torch
from torch import nn

from nanoserve.layers.context import LayerContext


class RotaryEmbedding(nn.Module):
    """cos and sin of every position's angles, [max_positions, head_dim / 2] each."""

    def __init__(
        self, head_dim: int, max_positions: int, theta: float, context: LayerContext
    ) -> None:
        super().__init__()
        # Angles in float32 always: at position 40,000, bfloat16 could not tell neighbours apart.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), theta**-exponents)
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", cos.to(context.device, context.dtype), persistent=False)
        self.register_buffer("sin", sin.to(context.device, context.dtype), persistent=False)
