"""Causal depthwise convolution over the last tokens of each sequence, in a packed batch.

Every channel is a weighted sum of its values at a token and at the `kernel - 1` tokens before it.
Those that earlier steps have computed are the layer's state.
"""

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata


def causal_conv(
    x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata
) -> tuple[Tensor, Tensor]:
    """Return the convolution of x [num_tokens, channels], and the new states.

    weight [channels, kernel]; state [num_rows, kernel - 1, channels], the values before each row's
    first token, oldest first.
    """
    num_before, num_channels = state.shape[1:]
    of_states, of_tokens, of_ends = _places(metadata, len(x), num_before)
    # All rows one after the other, each with its state in front.
    values = x.new_empty(state[..., 0].numel() + len(x), num_channels)
    values[of_states], values[of_tokens] = state, x
    out = values[of_tokens] * weight[:, num_before]
    for distance in range(1, num_before + 1):
        out += values[of_tokens - distance] * weight[:, num_before - distance]
    return out, values[of_ends]


def _places(metadata: AttentionMetadata, num_tokens: int, num_before: int) -> tuple[Tensor, ...]:
    """Return the places of states, tokens and new states, where each row has its state in front.

    They are [num_rows, num_before], [num_tokens] and [num_rows, num_before].
    """
    name = f"causal_conv_{num_before}"
    if name not in metadata.scratch:
        ends = metadata.cu_seqlens_q.long()
        rows, device = torch.arange(len(ends) - 1, device=ends.device), ends.device
        lengths = ends[1:] - ends[:-1]
        row_of_token = rows.repeat_interleave(lengths, output_size=num_tokens)
        tokens = torch.arange(num_tokens, device=device) + (row_of_token + 1) * num_before
        before = torch.arange(num_before, device=device)
        of_states = (ends[:-1] + rows * num_before).unsqueeze(-1) + before
        of_ends = (ends[1:] + rows * num_before).unsqueeze(-1) + before
        metadata.scratch[name] = of_states, tokens, of_ends
    return metadata.scratch[name]
