"""Exercise: check draft tokens in two ways, by rejection and by drawing.

Somebody has proposed k tokens, and one step of the model has computed `target` [k + 1, vocabulary]:
row i is the distribution of the token at the place of draft token i, if all before it are right;
the last row is that of the token behind all of them. Both functions return the tokens that come out
of the step, one to k + 1 of them.

`verify_by_rejection` is the field's rule (Leviathan et al. 2022, Chen et al. 2023):

1. Draft token i was drawn from `draft[i]`. Call its probability there q, and in `target[i]` p. It
   is accepted if `uniforms[i] < p / q`, as long as all before it were.
2. In the place of the first one that is not accepted, one token is drawn from the residual: what
   the target has more than the draft, divided by its sum. Nothing comes behind it.
3. If all are accepted, one more token is drawn, from the last row of `target`.
4. To draw with a number u: the first token at which the sum of the probabilities, from token 0 on,
   exceeds u. If rounding leaves even the last sum at or below u, which is below 1: the last token
   that has a probability. The number for the only draw of a step is `last_uniform`.

`verify_by_drawing` is nanoserve's rule. `noise` [k + 1, vocabulary] was drawn from Exp(1):

1. The token at a place is the one with the smallest noise / probability. A token without
   probability never wins.
2. A draft token is accepted if it is that token. The first token that was not is the step's last
   one, and so is the one behind all draft tokens.

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


def verify_by_drawing(target: np.ndarray, noise: np.ndarray, draft_tokens: list[int]) -> list[int]:
    raise NotImplementedError
