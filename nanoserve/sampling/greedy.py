"""Greedy sampling, as fast as memory delivers the logits."""

import torch

_CHUNK = 1024  # tokens of the vocabulary


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row, int64 [num_rows], the first among equals; -1 if not finite.

    It is -1 for a row with NaN or infinity anywhere, since a maximum propagates them, and for a row
    in which all logits are -inf.

    On a CPU only `amax` reads a vocabulary at the speed of memory, but it does not return the
    index. So `amax` finds the chunk, and `max`, which is twice as slow, searches only that chunk.
    """
    vocab_size = logits.shape[1]
    if vocab_size <= 4 * _CHUNK:
        highest, token_ids = logits.max(dim=-1)
        return token_ids.where(highest.isfinite(), -1)
    chunks = logits[:, : vocab_size // _CHUNK * _CHUNK].unflatten(1, (-1, _CHUNK))
    rest = logits[:, -_CHUNK:]  # in its overlap with the chunk before, that chunk wins
    highest = torch.cat([chunks.amax(-1), rest.amax(-1, keepdim=True)], dim=1)
    start = highest.max(-1, keepdim=True).indices.mul_(_CHUNK).clamp_(max=vocab_size - _CHUNK)
    chosen = logits.gather(1, start + torch.arange(_CHUNK, device=logits.device)).max(dim=-1)
    return (start[:, 0] + chosen.indices).where(chosen.values.isfinite(), -1)
