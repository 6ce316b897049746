"""Test of the exercise of chapter 3: the same tokens as without a cache, and no work done twice."""

from collections import Counter

import numpy as np
import pytest

from .exercise import generate

HIDDEN, HEAD_DIM, VOCAB = 12, 6, 40


class TinyModel:
    """A model with random weights. It counts the calls of each of its parts."""

    def __init__(self, num_layers: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.num_layers = num_layers
        self.table = rng.standard_normal((VOCAB, HIDDEN))
        self.qkv = rng.standard_normal((num_layers, 3, HEAD_DIM, HIDDEN))
        self.out = rng.standard_normal((num_layers, HIDDEN, HEAD_DIM))
        self.head = rng.standard_normal((VOCAB, HIDDEN))
        self.calls: Counter[str] = Counter()

    def embed(self, token_id: int, position: int) -> np.ndarray:
        self.calls["embed"] += 1
        return self.table[token_id] + np.cos(np.arange(HIDDEN) * 0.3 * position)

    def project(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.calls[f"project {layer}"] += 1
        q, k, v = self.qkv[layer] @ (x / np.linalg.norm(x))
        return q, k, v

    def finish(self, layer: int, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        return x + np.tanh(self.out[layer] @ attended)

    def choose(self, x: np.ndarray) -> int:
        self.calls["choose"] += 1
        return int(np.argmax(self.head @ x))


def without_cache(model: TinyModel, prompt: list[int], num_new: int) -> list[int]:
    """Recompute all tokens in all layers for every new one, with an explicit mask."""
    tokens = list(prompt)
    for _ in range(num_new):
        xs = np.array([model.embed(token, i) for i, token in enumerate(tokens)])
        for layer in range(model.num_layers):
            projected = [np.array(model.project(layer, x)) for x in xs]
            q, k, v = np.array(projected).transpose(1, 0, 2)
            scores = np.where(np.tri(len(tokens), dtype=bool), q @ k.T / HEAD_DIM**0.5, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended = weights / weights.sum(axis=1, keepdims=True) @ v
            xs = np.array([model.finish(layer, x, a) for x, a in zip(xs, attended, strict=True)])
        tokens.append(model.choose(xs[-1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("num_new", [1, 2, 12])
@pytest.mark.parametrize("prompt", [[7], [3, 3, 3], [1, 2, 30, 4, 5, 39]])
def test_the_tokens_are_those_of_recomputing(
    prompt: list[int], num_new: int, num_layers: int
) -> None:
    for seed in range(5):
        expected = without_cache(TinyModel(num_layers, seed), prompt, num_new)
        case = f"generate(TinyModel({num_layers}, seed={seed}), {prompt}, {num_new})"
        assert generate(TinyModel(num_layers, seed), prompt, num_new) == expected, case


def test_a_token_far_back_is_seen() -> None:
    """Use a model whose output depends on it; otherwise a loop without attention would pass."""
    prompts = [[n, 5, 6] for n in range(10)]
    found = [generate(TinyModel(3, seed=1), prompt, 8) for prompt in prompts]
    for prompt, tokens in zip(prompts, found, strict=True):
        case = f"generate(TinyModel(3, seed=1), {prompt}, 8)"
        assert tokens == without_cache(TinyModel(3, seed=1), prompt, 8), case
    assert len(set(map(tuple, found))) > 3, f"{prompts} have nearly the same outputs: {found}"


@pytest.mark.parametrize(("prompt_len", "num_new"), [(1, 1), (6, 1), (1, 9), (6, 9)])
def test_each_token_is_projected_once_and_the_last_one_never(prompt_len: int, num_new: int) -> None:
    model = TinyModel(num_layers=2, seed=0)
    generate(model, [4] * prompt_len, num_new)
    times = prompt_len + num_new - 1
    case = f"generate(TinyModel(2, seed=0), {[4] * prompt_len}, {num_new})"
    assert model.calls["project 0"] == model.calls["project 1"] == times, case
    assert model.calls["choose"] == num_new, case


def test_nothing_asked_nothing_done() -> None:
    prompt = [1, 2, 3]
    assert generate(TinyModel(2, seed=0), prompt, 0) == [], "the prompt was [1, 2, 3]"
    assert prompt == [1, 2, 3], "generate(model, prompt, 0) has changed the prompt"


def test_the_prompt_is_left_as_it_was() -> None:
    prompt = [1, 2, 3]
    generate(TinyModel(2, seed=0), prompt, 3)
    assert prompt == [1, 2, 3], "generate(model, prompt, 3) has changed the prompt"
