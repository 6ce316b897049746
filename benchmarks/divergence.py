"""Compare the next-token distributions of two models over many positions."""

from typing import NamedTuple

import numpy as np
import torch

_ROWS_AT_ONCE = 128  # of a vocabulary of 150,000, in float32: 77 MB


class Divergence(NamedTuple):
    """Divergence of a model from its reference."""

    mean: float  # absolute difference of the log-probability of the text's own next token, in nats
    largest: float
    kl_mean: float  # KL(reference || model), in nats
    kl_p99: float
    same_choice: float  # share of positions at which both have the same most likely token
    perplexity: float  # the model's own, of the text
    log_perplexity: float  # less the reference's: above 0, the text has become less likely


def divergence(reference: np.ndarray, logits: np.ndarray, next_ids: list[int]) -> Divergence:
    """Compare float32 [num_positions, vocab_size]; `next_ids` [num_positions] continue the texts.

    Raises `ValueError` unless there is a token for each position of both.
    """
    if reference.shape != logits.shape or len(next_ids) != len(logits):
        raise ValueError(
            f"logits {logits.shape} of {len(next_ids)} tokens cannot be compared with "
            f"{reference.shape}: both must be [num_positions, vocab_size]"
        )
    ids = torch.tensor(next_ids).unsqueeze(1)
    parts: list[tuple[torch.Tensor, ...]] = []
    for first in range(0, len(ids), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        p, q = (torch.from_numpy(x[rows].copy()).log_softmax(-1) for x in (reference, logits))
        own = [x.gather(1, ids[rows]).squeeze(1).double() for x in (p, q)]
        kl = (p.exp() * (p - q)).sum(-1)
        parts.append((*own, kl.double(), p.argmax(-1) == q.argmax(-1)))
    theirs, ours, kl, is_same = (torch.cat(column) for column in zip(*parts, strict=True))
    difference = ours - theirs
    return Divergence(
        mean=float(difference.abs().mean()),
        largest=float(difference.abs().max()),
        kl_mean=float(kl.mean()),
        kl_p99=float(kl.quantile(0.99)),
        same_choice=float(is_same.double().mean()),
        perplexity=float(ours.mean().neg().exp()),
        log_perplexity=-float(difference.mean()),
    )
