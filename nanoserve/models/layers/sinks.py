"""Attention sinks: a learned score for each head that no key has.

The score is in the sum of a softmax's exponentials and has no value, so the weights of all keys add
up to less than one: a head can attend to nothing. Without it, heads learn to attend to the first
token for that (Xiao et al. 2023, arXiv 2309.17453).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from nanoserve.attention.interface import AttentionLayer
from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.models.layers.context import LayerContext


class AttentionSinks(nn.Module):
    """The sinks of a layer, float32 [num_heads of this rank]; a checkpoint has a 1-D tensor.

    Raises `ValueError` if the attention backend does not support them.
    """

    def __init__(self, num_heads: int, context: LayerContext) -> None:
        super().__init__()
        if not context.attention.supports_sinks:
            raise ValueError(
                f"{type(context.attention).__name__} does not support attention sinks, which this "
                f"model has: choose attention_backend='torch', 'numba' or 'triton'"
            )
        own = context.tp.part(num_heads, "num_attention_heads")
        self.num_heads, self.first = num_heads, context.tp.rank * own
        self.scores = replace(context, dtype=torch.float32).empty(own)

    def of(self, layer: AttentionLayer) -> AttentionLayer:
        """Return `layer` with these sinks."""
        return replace(layer, sinks=self.scores)

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(own_name, self.scores, (self.num_heads,), 0, self.first)
