"""A solution of `exercise.py`."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy import ndarray

Partial = tuple[float, float, ndarray]


def partial(scores: ndarray, values: ndarray) -> Partial:
    if not len(scores):
        return -math.inf, 0.0, np.zeros(values.shape[1])
    largest = float(scores.max())
    weights = np.exp(scores - largest)
    return largest, float(weights.sum()), weights @ values


def merge(parts: list[Partial], sink: float) -> ndarray:
    largest = max(sink, *(m for m, _, _ in parts))
    denominator = math.exp(sink - largest)  # once, whatever the number of shares
    out = np.zeros_like(parts[0][2])
    for m, total, acc in parts:
        scale = math.exp(m - largest)
        denominator += scale * total
        out += scale * acc
    return out / denominator


def latent_attention(
    q: ndarray,
    p: ndarray,
    w_uk: ndarray,
    w_uv: ndarray,
    attend: Callable[[ndarray], ndarray],
    mscale: float = 1.0,
) -> ndarray:
    scale = mscale**2 / math.sqrt(q.shape[1] + p.shape[1])
    absorbed = np.einsum("hn,hnr->hr", q, w_uk)
    attended = attend(scale * np.concatenate((absorbed, p), axis=1))
    return np.einsum("hvr,hr->hv", w_uv, attended)


class State(Protocol):
    def read(self, keys: ndarray) -> ndarray: ...
    def update(self, decay: float, keys: ndarray, corrections: ndarray) -> None: ...


class Tokens(NamedTuple):
    q: ndarray
    k: ndarray
    v: ndarray
    decay: ndarray
    beta: ndarray


def delta_step(state: State, token: Tokens) -> ndarray:
    q, k, v, decay, beta = token
    # The state after the update is decay S + k u^T, so its product with q needs no second read.
    of_key, of_query = decay * np.split(state.read(np.concatenate((k, q))), 2)
    correction = beta * (v - of_key)
    state.update(float(decay[0]), k, correction)
    return of_query + (q @ k.T) * correction


def delta_chunk(state: State, tokens: Tokens) -> ndarray:
    q, k, v, decay, beta = tokens
    n = len(k)
    # Decays from before the chunk up to each token, and from each token up to each later one.
    logs = np.cumsum(np.log(decay))
    since_start = np.exp(logs)[:, None]
    between = np.exp(np.minimum(logs[:, None] - logs, 0))
    read = state.read(np.concatenate((k, q)))
    of_keys, of_queries = since_start * read[:n], since_start * read[n:]
    # Each correction takes account of the earlier ones: a triangular system.
    system = np.eye(n) + np.tril(beta[:, None] * between * (k @ k.T), -1)
    corrections = np.linalg.solve(system, beta[:, None] * (v - of_keys))
    out = of_queries + np.tril(between * (q @ k.T)) @ corrections
    state.update(float(since_start[-1, 0]), between[-1][:, None] * k, corrections)
    return out
