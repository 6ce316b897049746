"""The most likely token, as fast as memory gives the logits."""

import torch

_CHUNK = 1024  # of a vocabulary


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """int64 [num_rows]: each row's argmax, the first among equals; -1 if that is no finite number.

    So it is of a row with NaN or infinity anywhere, since a maximum passes them on, and of one that
    has nothing above -inf.

    On a CPU `amax` alone reads a vocabulary as fast as memory gives it, and it does not say where
    the maximum is. So it chooses a chunk, and `max`, twice as slow, only looks through that.
    """
    vocab_size = logits.shape[1]
    if vocab_size <= 4 * _CHUNK:
        highest, token_ids = logits.max(dim=-1)
        return token_ids.where(highest.isfinite(), -1)
    chunks = logits[:, : vocab_size // _CHUNK * _CHUNK].unflatten(1, (-1, _CHUNK))
    rest = logits[:, -_CHUNK:]  # what it shares with the chunk before, that one has won already
    highest = torch.cat([chunks.amax(-1), rest.amax(-1, keepdim=True)], dim=1)
    start = highest.max(-1, keepdim=True).indices.mul_(_CHUNK).clamp_(max=vocab_size - _CHUNK)
    chosen = logits.gather(1, start + torch.arange(_CHUNK, device=logits.device)).max(dim=-1)
    return (start[:, 0] + chosen.indices).where(chosen.values.isfinite(), -1)
