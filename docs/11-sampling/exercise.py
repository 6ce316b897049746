"""Exercise: sample one token, with filters, from stateless noise.

Write the three functions below with numpy. Nothing else from nanoserve is needed.

1. `kept(logits, top_k, top_p, min_p)` returns which tokens may be drawn, as bool [vocab_size], for
   one row of float logits (temperature has been applied). Apply the filters in this order, each to
   the tokens that the previous one kept:
   - min_p keeps tokens at least min_p times as likely as the most likely one (0 disables it);
   - top_k keeps the k most likely (values of 0 or less, or above the vocabulary size, disable it);
   - top_p keeps the smallest set of most likely tokens whose probability reaches top_p, where the
     remaining probabilities sum to 1 (1 disables it). The token that crosses the border is kept.
   Equal logits are treated alike: if one of them is kept, all are.

2. `noise(seed, completion, position, vocab_size)` returns float64 [vocab_size], each from Exp(1)
   and above 0. It is a pure function: the same arguments give the same numbers in every process,
   other arguments give other numbers, and no call reads or changes any state. Seeds, completions
   and positions are integers from 0 to 2^63. Neighbouring values must not give correlated numbers.
   (Hint: numpy has a generator whose state is only a key and a counter.)

3. `draw(logits, temperature, top_k, top_p, min_p, seed, completion, position)` returns the token as
   an int: the most likely one (the first among equals) if the temperature is 0, else the winner of
   the exponential race among the tokens that are kept.

Test it with: pytest -x docs/11-sampling/test_exercise.py
"""

import numpy as np


def kept(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    raise NotImplementedError


def noise(seed: int, completion: int, position: int, vocab_size: int) -> np.ndarray:
    raise NotImplementedError


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
    raise NotImplementedError
