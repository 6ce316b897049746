"""Worked examples for the chapter on sampling: filters, penalties, and the exponential race."""

import math
import struct
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from tables import table

# bfloat16 is the upper half of a float32: its keys leave out the lower 16 bits.
_UNUSED_BITS = 16

# Twelve logits, exact in bfloat16, of which top_p=0.9 keeps four.
SEARCHED = (20.0, 19.25, 18.5, 18.25, 17.5, 17.0, 16.5, 16.0, 15.25, 14.5, 13.0, 10.0)


class Pass(NamedTuple):
    """One pass over the row: the remaining range of keys, and three trial borders in it."""

    low: int
    high: int
    borders: tuple[float, ...]
    masses: tuple[float, ...]  # of the logits that reach each border, as a share of the total


def probabilities(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    """softmax(logits / temperature)."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def temperature_table(logits: Sequence[float], temperatures: Sequence[float]) -> str:
    """The same logits at several temperatures: the input and the output of the softmax."""
    rows = [
        [f"{t:g}", _join(logit / t for logit in logits), _join(probabilities(logits, t), "%.3f")]
        for t in temperatures
    ]
    return table(["temperature", "logits / temperature", "probabilities"], rows)


def logits_bytes(rows: int, vocab_size: int, dtype_bytes: int) -> int:
    """Memory of one step's logits: one number for each row and each token of the vocabulary."""
    return rows * vocab_size * dtype_bytes


def chance_of_a_slip(tail: float, num_tokens: int) -> float:
    """Probability of at least one token from a tail of that probability, in independent draws."""
    return 1 - (1 - tail) ** num_tokens


def renormalised(probs: Sequence[float], num_kept: int) -> list[float]:
    """`probs` in descending order: the first `num_kept`, divided by their sum; the others are 0."""
    total = sum(_exact(p) for p in probs[:num_kept])
    kept = [float(_exact(p) / total) for p in probs[:num_kept]]
    return kept + [0.0] * (len(probs) - num_kept)


def num_kept_by_top_p(probs: Sequence[float], p: float, drop_at_equality: bool = True) -> int:
    """How many of `probs`, in descending order, the nucleus holds (Holtzman et al. 2020).

    In exact arithmetic. A token is dropped if the mass before it has reached p, so the token
    that crosses the border is kept. `drop_at_equality` False drops it only once p is exceeded.
    """
    mass, kept = Fraction(0), 0
    for prob in probs:
        reached = mass >= _exact(p) if drop_at_equality else mass > _exact(p)
        if reached:
            break
        mass += _exact(prob)
        kept += 1
    return kept


def border_table(probs: Sequence[float], settings: Sequence[float]) -> str:
    """How many tokens are kept under each of the two readings of "reaches p"."""
    rows = [
        [f"{p:.2f}", num_kept_by_top_p(probs, p), num_kept_by_top_p(probs, p, False)]
        for p in settings
    ]
    return table(["top_p", "kept if mass before < p", "kept if mass before <= p"], rows)


def key_of(value: float) -> int:
    """The bits of a bfloat16 as an integer; keys have the order of the values."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)) >> _UNUSED_BITS


def value_of(key: int) -> float:
    """The bfloat16 value of a key."""
    turned = 0x7FFFFFFF >> _UNUSED_BITS << _UNUSED_BITS
    bits = key << _UNUSED_BITS
    return struct.unpack("<f", struct.pack("<i", bits ^ (bits >> 31 & turned)))[0]


def border_search(
    logits: Sequence[float], top_p: float, temperature: float = 1.0
) -> tuple[float, list[Pass]]:
    """The smallest logit that top-p keeps, found without a sort, and the passes of the search.

    The algorithm of `nanoserve.kernels.triton.filter_logits`: it finds the largest key such that
    the logits that reach it have a mass of at least `top_p`. Each pass tries three keys, which
    divide the range into four.
    """
    largest = max(logits)
    total = _mass(logits, -math.inf, temperature)
    # Logits below have too little mass to matter, even if they are the whole vocabulary.
    negligible = largest - temperature * (1 - math.log((1 - top_p) / len(logits)))
    low, high = key_of(negligible) - 1, key_of(largest)
    passes = []
    while low < high:
        width = high - low
        keys = [low + (width + 3) // 4, low + (width + 1) // 2, low + (3 * width + 3) // 4]
        borders = tuple(value_of(key) for key in keys)
        masses = tuple(_mass(logits, border, temperature) / total for border in borders)
        passes.append(Pass(low, high, borders, masses))
        reached = sum(mass >= top_p for mass in masses)  # masses fall as borders rise
        if reached < 3:
            high = keys[reached] - 1
        if reached:
            low = keys[reached - 1]
    return value_of(low), passes


def border_search_table(top_p: float, logits: Sequence[float] = SEARCHED) -> str:
    """The passes of `border_search`: a border whose mass reaches `top_p` is in bold."""
    rows = []
    for i, (low, high, borders, masses) in enumerate(border_search(logits, top_p)[1], 1):
        tried = [
            f"**{border:g}: {mass:.3f}**" if mass >= top_p else f"{border:g}: {mass:.3f}"
            for border, mass in zip(borders, masses, strict=True)
        ]
        rows.append([i, f"{value_of(low):g} to {value_of(high):g}", high - low + 1, *tried])
    header = ["pass", "range", "keys in it", "first border: mass above", "second", "third"]
    return table(header, rows)


def num_searched_keys(top_p: float, logits: Sequence[float] = SEARCHED) -> int:
    """The number of bfloat16 values in the initial range of the search."""
    first = border_search(logits, top_p)[1][0]
    return first.high - first.low + 1


def num_passes(top_p: float, logits: Sequence[float] = SEARCHED) -> int:
    return len(border_search(logits, top_p)[1])


def found_border(top_p: float, logits: Sequence[float] = SEARCHED) -> float:
    return border_search(logits, top_p)[0]


def most_passes(num_keys: int) -> int:
    """The most passes of `border_search` over so many keys; each pass leaves about a quarter."""
    width, passes = num_keys - 1, 0
    while width > 0:
        first, second, third = (width + 3) // 4, (width + 1) // 2, (3 * width + 3) // 4
        width = max(first - 1, second - 1 - first, third - 1 - second, width - third)
        passes += 1
    return passes


def keys_to_search(largest: float, top_p: float, vocab_size: int, temperature: float = 1.0) -> int:
    """The number of bfloat16 values that the search has to consider, plus one for rounding.

    Logits below have less than 1 - top_p of the largest one's mass, even if they are the whole
    vocabulary.
    """
    negligible = largest - temperature * (1 - math.log((1 - top_p) / vocab_size))
    return key_of(largest) - key_of(negligible) + 2


def num_kept_above(border: float, logits: Sequence[float] = SEARCHED) -> int:
    return sum(logit >= border for logit in logits)


def num_kept_by_min_p(probs: Sequence[float], min_p: float) -> int:
    """How many tokens are at least `min_p` times as likely as the most likely one."""
    return sum(_exact(prob) >= _exact(min_p) * _exact(max(probs)) for prob in probs)


def penalised(
    logit: float,
    count: int,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> float:
    """The logit of a token that was generated `count` times; 0 if it is only in the prompt.

    Repetition: Keskar et al. 2019 (CTRL); frequency and presence: OpenAI's API.
    """
    logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - presence * (count > 0)


def race_table(logits: Sequence[float], uniforms: Sequence[float]) -> str:
    """One race: E = -log(1 - u) is the noise, E / p the time, logit - log E the score."""
    probs = probabilities(logits)
    rows = [
        [token, f"{p:.3f}", f"{u:g}", f"{e:.3f}", f"{e / p:.2f}", f"{logit - math.log(e):.2f}"]
        for token, (logit, p, u, e) in enumerate(
            zip(logits, probs, uniforms, map(_exponential, uniforms), strict=True)
        )
    ]
    return table(["token", "p", "u", "E", "time E / p", "score logit - log E"], rows)


def race_winner(logits: Sequence[float], uniforms: Sequence[float]) -> int:
    """The token with the smallest time."""
    probs = probabilities(logits)
    times = [_exponential(u) / p for u, p in zip(uniforms, probs, strict=True)]
    return times.index(min(times))


def race_shares(logits: Sequence[float], num_draws: int) -> list[float]:
    """Shares of the tokens in draws by nanoserve's own race, at positions 0 to num_draws - 1."""
    import numpy as np
    import torch

    from nanoserve.sampling.gumbel_noise import Noise, row_keys
    from nanoserve.sampling.sampler import best_tokens

    zeros = np.zeros(num_draws, dtype=np.uint64)
    keys = row_keys(zeros, np.arange(num_draws), zeros)
    scores = torch.tensor(logits, dtype=torch.float32).repeat(num_draws, 1)
    noise = Noise(len(logits), torch.device("cpu"))
    noise.subtract_log_exponential(scores, keys)
    counts = torch.bincount(best_tokens(scores), minlength=len(logits))
    return [count / num_draws for count in counts.tolist()]


def chance_of_a_tie(vocab_size: int, bits: int) -> float:
    """Probability that the smallest of `vocab_size` uniforms of so many bits occurs twice.

    The uniforms fall into 2^bits cells, each with a Poisson count of mean vocab_size / 2^bits. The
    result is the probability that the first non-empty cell holds more than one.
    """
    mean = vocab_size / 2**bits
    return 1 - mean / math.expm1(mean)


def neighbours_table(seed: int, position: int) -> str:
    """Noise for one row, behind 0, 1 and 2 others: from a shared generator, and from the hash.

    The generator gives each row of a step its next number; the hash is nanoserve's `row_keys`.
    """
    from random import Random

    import numpy as np

    from nanoserve.sampling.gumbel_noise import row_keys

    rows = []
    for num_others in range(3):
        generator = Random(seed)
        drawn = [generator.random() for _ in range(num_others + 1)]
        seeds = np.array([*range(100, 100 + num_others), seed], dtype=np.uint64)
        positions = np.array([*range(num_others), position])
        key = int(row_keys(seeds, positions, 0 * positions)[-1]) & 0xFFFFFFFF
        rows.append([num_others, f"{drawn[-1]:.6f}", f"`{key:08x}`"])
    return table(["rows in front", "shared generator", "key of the row"], rows)


def _mass(logits: Sequence[float], border: float, temperature: float) -> float:
    """Mass of the logits that reach `border`, relative to that of the largest logit."""
    largest = max(logits)
    return sum(math.exp((x - largest) / temperature) for x in logits if x >= border)


def _exact(number: float) -> Fraction:
    """The decimal number exactly as written: 0.9 is nine tenths, which no binary float equals."""
    return Fraction(str(number))


def _exponential(u: float) -> float:
    return -math.log1p(-u)


def _join(numbers: Iterable[float], form: str = "%g") -> str:
    return ", ".join(form % number for number in numbers)
