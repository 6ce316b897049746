"""Sampling on a CPU: temperature, Gumbel noise and argmax in one pass over the logits.

`nanoserve.sampling.gumbel_noise` computes the noise of the whole vocabulary: about fifteen torch
operators and two logarithms per token. But few tokens can win. Here an upper bound of each token's
noise is derived from the bits of its random number; the noise is computed only if the bound exceeds
the best score so far.
"""

import math

import numpy as np
from numba import njit, prange
from torch import Tensor

from nanoserve.kernels.cpu import checks
from nanoserve.kernels.cpu.elements import ELEMENTS, EXACT, FAST, address, array_at, to_float

FEW = 2**16  # logits; for so few, one thread is faster than waking more threads
_AT_ONCE = 256  # tokens whose bounds are compared together
_WEYL = np.uint32(0x9E3779B9)
_LN2 = np.float32(math.log(2))
_SLACK = np.float32(1e-4)  # exceeds the rounding error of a bound


def choose_tokens(
    logits: Tensor,
    temperatures: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    completions: np.ndarray,
) -> np.ndarray:
    """Return int64 [num_rows]: each row's token, as `Sampler` chooses it, or -1 if there is none.

    logits: [num_rows, vocab_size], contiguous, float32 or bfloat16. The rest is [num_rows]: float32
    temperatures (0 is greedy), uint64 seeds, int64 positions of the new tokens, uint32 completions.
    Raises `ValueError` for other shapes and dtypes.
    """
    dtypes = np.float32, np.uint64, np.int64, np.uint32
    names = "temperatures", "seeds", "positions", "completions"
    of_rows = temperatures, seeds, positions, completions
    checks.check_choice(logits, dict(zip(names, zip(of_rows, dtypes, strict=True), strict=True)))
    out = np.empty(len(logits), dtype=np.int64)
    choose = _one_by_one if logits.numel() <= FEW else _in_parallel
    choose(address(logits), tuple(logits.shape), *of_rows, out, ELEMENTS[logits.dtype])
    return out


@njit(inline="always", **FAST)
def _mix(x):
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32(np.uint32(x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@njit(inline="always", **FAST)
def _row_key(seed, position, completion):
    key = _mix(np.uint32(np.uint32(seed) + _WEYL))
    key = _mix(np.uint32(np.uint32(key ^ np.uint32(seed >> np.uint64(32))) + _WEYL))
    key = _mix(np.uint32(np.uint32(key ^ np.uint32(position)) + _WEYL))
    return _mix(np.uint32(np.uint32(key ^ np.uint32(completion)) + _WEYL))


@njit(inline="always", **FAST)
def _uniform(key, token):
    """Return a uniform random number in (0, 1], rounded as in `Noise`."""
    x = _mix(np.uint32(np.uint32(np.uint32(token) * _WEYL) ^ key))
    return (np.float32(x) + np.float32(0.5)) * np.float32(2.0**-32)


@njit(inline="always", **FAST)
def _bound(u):
    """Return an upper bound of -log E, where E = -log(1 - u).

    E >= u, so -log u is a bound. A float's bits, read as an integer, are a piecewise linear lower
    bound of its logarithm to base 2, exact at powers of two.
    """
    bits = np.float32(np.float32(u).view(np.int32)) * np.float32(2.0**-23)
    return _LN2 * (np.float32(127) - bits) + _SLACK


@njit(**EXACT)
def _score(logit, temperature, u):
    """Return a logit, divided by the temperature, plus the noise of `Sampler`."""
    return logit / temperature - np.float32(math.log(-math.log1p(-np.float64(u))))


@njit(**FAST)
def _winner(logits, temperature, key):
    """Return the sampled token of a row, or -1 where `best_tokens` has none."""
    best, chosen = np.float32(-np.inf), -1
    scores = np.empty(_AT_ONCE, np.float32)
    for start in range(0, len(logits), _AT_ONCE):
        size = min(_AT_ONCE, len(logits) - start)
        num_above = 0
        for i in range(size):
            scores[i] = to_float(logits[start + i]) / temperature + _bound(_uniform(key, start + i))
            num_above += not scores[i] <= best  # also counts NaN
        if num_above == 0:
            continue
        for i in range(size):
            if not scores[i] <= best:
                u = min(_uniform(key, start + i), np.float32(1 - 2.0**-24))
                score = _score(to_float(logits[start + i]), temperature, u)
                if not score < np.inf:
                    return -1
                if score > best:
                    best, chosen = score, start + i
    return chosen


@njit(**FAST)
def _first_best(logits):
    """Return the token with the largest logit (greedy), or -1 where `best_tokens` has none."""
    best, chosen = np.float32(-np.inf), -1
    for i in range(len(logits)):
        logit = to_float(logits[i])
        if not logit <= best:
            if not logit < np.inf:
                return -1
            best, chosen = logit, i
    return chosen


@njit(**FAST)
def _choose(row, logits, temperatures, seeds, positions, completions, out):
    if temperatures[row] > 0:
        key = _row_key(seeds[row], positions[row], completions[row])
        out[row] = _winner(logits[row], temperatures[row], key)
    else:
        out[row] = _first_best(logits[row])


@njit(**FAST)
def _one_by_one(logits, shape, temperatures, seeds, positions, completions, out, element):
    """Set out[row] to the row's token, as `Sampler` chooses it.

    logits: the address of an array [num_rows, vocab_size] of `element`s, see `array_at`. Other
    arguments are as in `choose_tokens`.
    """
    logits = array_at(logits, shape, element)
    for row in range(shape[0]):
        _choose(row, logits, temperatures, seeds, positions, completions, out)


@njit(parallel=True, **FAST)
def _in_parallel(logits, shape, temperatures, seeds, positions, completions, out, element):
    logits = array_at(logits, shape, element)
    for row in prange(shape[0]):
        _choose(row, logits, temperatures, seeds, positions, completions, out)
