"""Exercise: a sink merged from shares, an absorbed latent, and a state in one chunk.

Complete the functions in numpy, in float64. None of them changes its arguments.

1. Sinks. `partial` is attention of one head over some of its keys, and `merge` makes a result of
   several such shares and the head's sink. A partial result is (m, total, acc): the largest score,
   the sum of exp(score - m), and the sum of exp(score - m) x value. A share may have no keys: then
   it is (-inf, 0, zeros). A sink may be -inf, which is none. Nothing may overflow or be NaN.
2. Latents. `latent_attention` computes what a model with multi-head latent attention computes for
   one token, but it gets neither keys nor values. `attend(queries)` is a kernel for one KV head: it
   multiplies each query by all cached vectors (c, r), takes the softmax over the tokens as it is,
   without a scale, and returns the sums of the c with these weights. Call it once. Scores of the
   model are scaled by `mscale` squared / sqrt(nope + rope), the size of a head that is *not*
   absorbed.
3. States. `delta_step` is the gated delta rule for one token, and `delta_chunk` for several tokens
   at once. They see the state through an object with two methods; each call costs as much as all
   of the state's bytes:

   - `read(keys)` returns keys @ S, [n, K] -> [n, V];
   - `update(decay, keys, corrections)` replaces S by decay x S + keys.T @ corrections.

   For each token: S is multiplied by its decay; then beta x (v - k @ S) is added for its key; then
   the output is q @ S. Call `read` once and `update` once, also for a chunk: read, for all keys and
   queries, what the state was *before* the chunk, and compute the rest from the tokens themselves.

Test it with `pytest -x docs/27-sinks-latents-states/test_exercise.py`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from numpy import ndarray

Partial = tuple[float, float, ndarray]


def partial(scores: ndarray, values: ndarray) -> Partial:
    """Scores [keys] and values [keys, size] of a share -> (m, total, acc [size])."""
    raise NotImplementedError


def merge(parts: list[Partial], sink: float) -> ndarray:
    """Partial results, of which at least one has keys, and the head's sink -> [size]."""
    raise NotImplementedError


def latent_attention(
    q: ndarray,
    p: ndarray,
    w_uk: ndarray,
    w_uv: ndarray,
    attend: Callable[[ndarray], ndarray],
    mscale: float = 1.0,
) -> ndarray:
    """Return the heads' results, [heads, value].

    q [heads, nope], p [heads, rope]: a head's query is (q, p), its key for a token (w_uk c, r).
    w_uk [heads, nope, rank], w_uv [heads, value, rank].
    attend: [heads, rank + rope] -> [heads, rank].
    """
    raise NotImplementedError


class State(Protocol):
    def read(self, keys: ndarray) -> ndarray: ...
    def update(self, decay: float, keys: ndarray, corrections: ndarray) -> None: ...


class Tokens(NamedTuple):
    """q, k [n, K]; v [n, V]; decay, beta [n]; decays are between 0 and 1, and not 0."""

    q: ndarray
    k: ndarray
    v: ndarray
    decay: ndarray
    beta: ndarray


def delta_step(state: State, token: Tokens) -> ndarray:
    """One token (n is 1) -> its output [1, V]; the state is updated."""
    raise NotImplementedError


def delta_chunk(state: State, tokens: Tokens) -> ndarray:
    """Any number of tokens -> their outputs [n, V]; the state is updated."""
    raise NotImplementedError
