"""A solution of `exercise.py`."""

import numpy as np


def kept(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Each filter reduces to the smallest logit that it keeps, so ties need no special case."""
    left = np.asarray(logits, dtype=np.float64).copy()
    if min_p > 0:
        left[left < left.max() + np.log(min_p)] = -np.inf
    if 0 < top_k < len(left):
        left[left < np.sort(left)[-top_k]] = -np.inf
    if top_p < 1:
        falling = np.sort(left)[::-1]
        probs = np.exp(falling - falling[0])
        probs /= probs.sum()
        mass_before = np.cumsum(probs) - probs
        border = falling[mass_before < top_p][-1]  # the last one that is kept
        left[left < border] = -np.inf
    return np.isfinite(left)


def noise(seed: int, completion: int, position: int, vocab_size: int) -> np.ndarray:
    """Philox (Salmon et al. 2011): its state is only a key and a counter.

    The position is in a word of the counter that counting through a vocabulary never reaches.
    """
    key = np.array([seed, completion], dtype=np.uint64)
    counter = np.array([0, 0, position, 0], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(vocab_size)
    return -np.log1p(-np.maximum(uniform, 2.0**-54))


def draw(
    logits: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    completion: int,
    position: int,
) -> int:
    if temperature == 0:
        return int(np.argmax(logits))
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    scores = scaled - np.log(noise(seed, completion, position, len(scaled)))
    scores[~kept(scaled, top_k, top_p, min_p)] = -np.inf
    return int(np.argmax(scores))
