"""Exercise: draw one token, with filters, from noise that has no state.

Write the three functions below with numpy. Nothing else of nanoserve is needed.

1. `kept(logits, top_k, top_p, min_p)` says which tokens may be drawn, as bool [vocab_size], for one
   row of float logits (temperature has been applied). In this order, each over what the one before
   has left:
   - min_p keeps tokens at least min_p times as likely as the most likely one (0 is off);
   - top_k keeps the k most likely (0 and below are off, and so is more than the vocabulary);
   - top_p keeps the smallest set of most likely tokens whose probability reaches top_p, the
     probabilities of what is left summing to 1 (1 is off). The token that crosses the border stays.
   Equal logits share their fate: if one of them is kept, all are.

2. `noise(seed, completion, position, vocab_size)` gives float64 [vocab_size], each from Exp(1) and
   above 0, and is a pure function: the same arguments give the same numbers in every process,
   other arguments give other numbers, and no call sees or leaves any state. Seeds, completions and
   positions are integers from 0 to 2^63. Nearby ones must not give related numbers.
   (A hint: numpy has a generator whose state is nothing but a key and a counter.)

3. `draw(logits, temperature, top_k, top_p, min_p, seed, completion, position)` returns the token as
   an int: the most likely one (the first among equals) if the temperature is 0, else the winner of
   the exponential race among those that are kept.

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
