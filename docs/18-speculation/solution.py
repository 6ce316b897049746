"""A solution of `exercise.py`."""

import numpy as np


def verify_by_rejection(
    target: np.ndarray,
    draft: np.ndarray,
    draft_tokens: list[int],
    uniforms: list[float],
    last_uniform: float,
) -> list[int]:
    """draft: [k, vocabulary]. uniforms: one for each draft token, from [0, 1)."""
    token_ids: list[int] = []
    for p, q, token_id, u in zip(target, draft, draft_tokens, uniforms, strict=False):
        if u >= p[token_id] / q[token_id]:
            residual = np.maximum(0, p - q)
            return [*token_ids, _sample(residual / residual.sum(), last_uniform)]
        token_ids.append(token_id)
    return [*token_ids, _sample(target[-1], last_uniform)]


def _sample(probabilities: np.ndarray, u: float) -> int:
    token_id = int(np.searchsorted(np.cumsum(probabilities), u, side="right"))
    # Rounding may leave all sums at or below u.
    return min(token_id, int(probabilities.nonzero()[0][-1]))


def verify_by_sampling(target: np.ndarray, noise: np.ndarray, draft_tokens: list[int]) -> list[int]:
    token_ids: list[int] = []
    with np.errstate(divide="ignore"):
        for position, times in enumerate(noise / target):
            token_ids.append(int(times.argmin()))
            if draft_tokens[position : position + 1] != token_ids[-1:]:
                break
    return token_ids
