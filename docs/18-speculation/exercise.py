"""Exercise: verify draft tokens in two ways, by rejection sampling and by sampling.

A proposer has proposed k tokens, and one step of the model has computed `target`
[k + 1, vocabulary]: row i is the distribution of the token at the position of draft token i, if all
draft tokens before it are accepted; the last row is that of the token after all of them. Both
functions return the tokens that the step yields, one to k + 1 of them.

`verify_by_rejection` is the standard rule (Leviathan et al. 2022, Chen et al. 2023):

1. Draft token i was sampled from `draft[i]`. Let q be its probability there, and p its probability
   in `target[i]`. It is accepted if `uniforms[i] < p / q` and all before it were accepted.
2. In the place of the first one that is rejected, one token is sampled from the residual: the
   positive part of target minus draft, divided by its sum. No token follows it.
3. If all are accepted, one more token is sampled, from the last row of `target`.
4. Sampling with a number u returns the first token at which the sum of the probabilities, from
   token 0 on, exceeds u. If, by rounding, even the last sum is at or below u, which is below 1, it
   returns the last token that has a probability. A step samples at most once, with `last_uniform`.

`verify_by_sampling` is nanoserve's rule. `noise` [k + 1, vocabulary] was sampled from Exp(1):

1. The token at a position is the one with the smallest noise / probability. A token with
   probability 0 never wins.
2. A draft token is accepted if it equals that token. The step ends with the first sampled token
   that differs from the draft token, or with the one after all draft tokens.

Test it with `pytest -x docs/18-speculation/test_exercise.py`.
"""

import numpy as np


def verify_by_rejection(
    target: np.ndarray,
    draft: np.ndarray,
    draft_tokens: list[int],
    uniforms: list[float],
    last_uniform: float,
) -> list[int]:
    """draft: [k, vocabulary]. uniforms: one for each draft token, from [0, 1)."""
    raise NotImplementedError


def verify_by_sampling(target: np.ndarray, noise: np.ndarray, draft_tokens: list[int]) -> list[int]:
    raise NotImplementedError
