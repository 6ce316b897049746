"""The exercise of chapter 27 against softmax, keys of heads and a state, written out plainly."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from numpy import ndarray

from .exercise import Tokens, delta_chunk, delta_step, latent_attention, merge, partial


def near(found: ndarray, expected: ndarray, case: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=str(case))


# ---------------------------------------------------------------- sinks


def softmax_with_sink(scores: ndarray, values: ndarray, sink: float) -> ndarray:
    """The definition: the sink is one more score, whose value is zero."""
    scores = np.append(scores, sink)
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum())[:-1] @ values


def shares_of(scores: ndarray, values: ndarray, borders: list[int]) -> list:
    cuts = [0, *borders, len(scores)]
    return [partial(scores[a:b], values[a:b]) for a, b in pairwise(cuts)]


def test_a_partial_result_is_relative_to_its_largest_score() -> None:
    m, total, acc = partial(np.array([1000.0, 1001.0]), np.array([[1.0, 0.0], [0.0, 1.0]]))
    assert m == 1001.0, f"the largest of 1000 and 1001 is not {m}"
    near(np.array([total]), np.array([1 + math.exp(-1)]), "scores 1000 and 1001: the sum")
    near(acc, np.array([math.exp(-1), 1.0]), "scores 1000 and 1001: the weighted values")


def test_a_share_without_keys() -> None:
    m, total, acc = partial(np.zeros(0), np.zeros((0, 3)))
    assert m == -math.inf and total == 0 and acc.tolist() == [0, 0, 0], (m, total, acc)
    one = partial(np.array([2.0]), np.array([[1.0, 2.0, 3.0]]))
    for parts in ([(m, total, acc), one], [one, (m, total, acc)]):
        near(merge(parts, -math.inf), np.array([1.0, 2.0, 3.0]), "one share of two has no keys")


@pytest.mark.parametrize("sink", [0.0, 2.5, -math.inf, -800.0, 800.0])
def test_a_sink_is_counted_once_however_the_keys_are_shared(sink: float) -> None:
    rng = np.random.default_rng(3)
    scores, values = 3 * rng.standard_normal(12), rng.standard_normal((12, 4))
    expected = softmax_with_sink(scores, values, sink)
    for borders in ([], [5], [1, 2, 3], [0, 4, 4, 12], list(range(1, 12))):
        found = merge(shares_of(scores, values, borders), sink)
        near(found, expected, f"sink {sink}, shares that end at {borders}")


def test_shares_have_largest_scores_of_their_own() -> None:
    scores, values = np.array([-700.0, 20.0, 700.0, 699.0]), np.eye(4)
    expected = softmax_with_sink(scores, values, 699.5)
    parts = shares_of(scores, values, [1, 2])
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        near(merge([parts[i] for i in order], 699.5), expected, f"shares in the order {order}")


# ---------------------------------------------------------------- latents


@dataclass
class Latents:
    """A model's matrices, a cache of some tokens, and a kernel that sees only the cache."""

    heads: int = 3
    nope: int = 5
    rope: int = 2
    rank: int = 4
    value: int = 6
    calls: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.heads + self.rank)
        self.q = rng.standard_normal((self.heads, self.nope))
        self.p = rng.standard_normal((self.heads, self.rope))
        self.w_uk = rng.standard_normal((self.heads, self.nope, self.rank))
        self.w_uv = rng.standard_normal((self.heads, self.value, self.rank))
        self.c, self.r = rng.standard_normal((7, self.rank)), rng.standard_normal((7, self.rope))

    def attend(self, queries: ndarray) -> ndarray:
        self.calls += 1
        assert queries.shape == (self.heads, self.rank + self.rope), (
            f"a query is as long as a cached vector, {self.rank} + {self.rope}: {queries.shape}"
        )
        scores = queries @ np.concatenate((self.c, self.r), axis=1).T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True) @ self.c

    def naive(self, mscale: float) -> ndarray:
        """With keys and values of heads, one head and token after the other."""
        out = np.zeros((self.heads, self.value))
        scale = mscale * mscale / math.sqrt(self.nope + self.rope)
        for h in range(self.heads):
            keys = [
                np.concatenate((self.w_uk[h] @ c, r)) for c, r in zip(self.c, self.r, strict=True)
            ]
            query = np.concatenate((self.q[h], self.p[h]))
            weights = np.exp([scale * (query @ key) for key in keys])
            for weight, c in zip(weights / weights.sum(), self.c, strict=True):
                out[h] += weight * (self.w_uv[h] @ c)
        return out


@pytest.mark.parametrize("mscale", [1.0, 1.3689])
@pytest.mark.parametrize(
    "model",
    [Latents(), Latents(heads=1), Latents(nope=4, rank=4, value=4), Latents(rank=9, rope=4)],
)
def test_the_absorbed_form_is_that_of_keys_and_values(model: Latents, mscale: float) -> None:
    model.calls = 0
    arguments = (model.q, model.p, model.w_uk, model.w_uv)
    copies = [x.copy() for x in arguments]
    found = latent_attention(*arguments, model.attend, mscale)
    near(found, model.naive(mscale), f"{model}, mscale {mscale}")
    assert model.calls == 1, f"the kernel was called {model.calls} times"
    assert all(map(np.array_equal, arguments, copies)), "the arguments are not to be changed"


# ---------------------------------------------------------------- states


@dataclass
class Counted:
    """A state in memory that counts how often it is read and updated."""

    s: ndarray
    reads: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)

    def read(self, keys: ndarray) -> ndarray:
        self.reads.append(len(keys))
        return keys @ self.s

    def update(self, decay: float, keys: ndarray, corrections: ndarray) -> None:
        assert len(keys) == len(corrections), f"{len(keys)} keys, {len(corrections)} corrections"
        self.updates.append(len(keys))
        self.s = decay * self.s + keys.T @ corrections


def one_by_one(s: ndarray, tokens: Tokens) -> tuple[ndarray, ndarray]:
    """The rule as it is defined: outputs and the last state."""
    out = []
    for q, k, v, decay, beta in zip(*tokens, strict=True):
        s = decay * s
        s = s + np.outer(k, beta * (v - k @ s))
        out.append(q @ s)
    return np.array(out), s


def random_tokens(n: int, seed: int, keys: int = 4, values: int = 3) -> Tokens:
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, n, keys))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    decay = np.exp(-rng.exponential(0.5, n))
    return Tokens(q, k, rng.standard_normal((n, values)), decay, rng.random(n))


def check(step, s: ndarray, tokens: Tokens, case: object) -> ndarray:
    state = Counted(s.copy())
    copies = [x.copy() for x in tokens]
    found = step(state, tokens)
    expected, last = one_by_one(s, tokens)
    near(found, expected, f"outputs, {case}")
    near(state.s, last, f"the state afterwards, {case}")
    assert len(state.reads) == 1, f"the state was read {len(state.reads)} times, {case}"
    assert len(state.updates) == 1, f"the state was updated {len(state.updates)} times, {case}"
    assert all(map(np.array_equal, tokens, copies)), "the arguments are not to be changed"
    return state.s


@pytest.mark.parametrize("step", [delta_step, delta_chunk])
def test_one_token_by_hand(step) -> None:
    """The state has (2, 4) for the first key; half is forgotten, and (3, 2) is to be known."""
    row = np.array([[1.0, 0.0]])
    token = Tokens(row, row, np.array([[3.0, 2.0]]), np.array([0.5]), np.array([1.0]))
    state = Counted(np.array([[2.0, 4.0], [6.0, 8.0]]))
    near(step(state, token), np.array([[3.0, 2.0]]), "with beta = 1, the value replaces")
    near(state.s, np.array([[3.0, 2.0], [3.0, 4.0]]), "the other key is forgotten by half")


@pytest.mark.parametrize("seed", range(5))
def test_one_token_after_another(seed: int) -> None:
    s = np.random.default_rng(seed).standard_normal((4, 3))
    for token in range(5):
        s = check(delta_step, s, random_tokens(1, 10 * seed + token), f"token {token}, seed {seed}")


@pytest.mark.parametrize("n", [1, 2, 3, 8, 40])
def test_a_chunk_is_what_its_tokens_are_one_by_one(n: int) -> None:
    rng = np.random.default_rng(n)
    for s in (np.zeros((4, 3)), rng.standard_normal((4, 3))):
        check(delta_chunk, s, random_tokens(n, n), f"{n} tokens, from {s.tolist()}")


def test_a_prompt_in_any_chunks() -> None:
    tokens, start = random_tokens(23, 7), np.random.default_rng(7).standard_normal((4, 3))
    expected, last = one_by_one(start, tokens)
    for size in (1, 2, 5, 22, 23):
        state, parts = Counted(start.copy()), []
        for first in range(0, 23, size):
            part = Tokens(*(x[first : first + size] for x in tokens))
            parts.append(delta_chunk(state, part))
        near(np.concatenate(parts), expected, f"chunks of {size}")
        near(state.s, last, f"the state after chunks of {size}")


def test_equal_keys_correct_each_other() -> None:
    """The same key in each token: the last correction has to know all earlier ones."""
    n = 6
    row = np.tile([0.6, 0.8, 0.0, 0.0], (n, 1))
    values = np.arange(3.0 * n).reshape(n, 3)
    tokens = Tokens(row, row, values, np.full(n, 0.9), np.ones(n))
    check(delta_chunk, np.ones((4, 3)), tokens, "six tokens with one key, beta 1")


def test_a_token_that_forgets_nearly_all() -> None:
    """The decay between two tokens has no part of what was forgotten before the first of them."""
    tokens = random_tokens(6, 11)
    tokens.decay[2:4] = 1e-200
    check(delta_chunk, np.ones((4, 3)), tokens, f"decays {tokens.decay.tolist()}")
