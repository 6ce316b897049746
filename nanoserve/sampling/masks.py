"""Which tokens a grammar allows, as bits, beside logits."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from nanoserve.engine.executor import TokenMask
from nanoserve.sampling.rows import tensor_of


def fill_masks(
    places: Iterable[tuple[TokenMask, int]], vocab_size: int
) -> tuple[np.ndarray, dict[int, Exception]]:
    """int32 [num_places, ceil(vocab_size / 32)], for rows by their limit and their index in it; and
    what was raised, by number of the place, where the mask has all bits."""
    places = list(places)
    masks = np.full((len(places), -(-vocab_size // 32)), -1, dtype=np.int32)
    errors: dict[int, Exception] = {}
    for number, (limit, index) in enumerate(places):
        try:
            limit.fill(index, masks[number])
        except ValueError as error:
            errors[number] = error
    return masks, errors


def places_of(limits: Sequence[TokenMask | None]) -> dict[int, tuple[TokenMask, int]]:
    """By row, its limit and its index in it. The rows of one limit are in order."""
    seen: dict[Any, int] = {}
    places = {}
    for row, limit in enumerate(limits):
        if limit is not None:
            places[row] = limit, seen.get(limit, 0)
            seen[limit] = seen.get(limit, 0) + 1
    return places


def bits_of(masks: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """bool [num_rows, vocab_size]: which tokens each mask allows, beside the logits."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return torch.from_numpy(bits.view(bool)).to(logits.device)


def apply_limits(logits: torch.Tensor, limits: Sequence[TokenMask | None]) -> dict[int, Exception]:
    """Forbid in place what the limits of these rows do; float32 [num_rows, vocab_size].

    Returns errors, by row. What is no finite number stays: it is an error wherever it is.
    """
    places = places_of(limits)
    masks, failed = fill_masks(places.values(), logits.shape[1])
    rows = np.array(list(places), dtype=np.int64)
    index = tensor_of(rows, logits)
    own = logits[index]
    logits[index] = own.masked_fill_(~bits_of(masks, own) & own.isfinite(), -torch.inf)
    return {int(rows[number]): error for number, error in failed.items()}


def error_of_none() -> ValueError:
    """For a row whose grammar allows none of the model's tokens."""
    return ValueError(
        "no token can be chosen after structured_outputs: its grammar has come to an end, or to "
        "what this tokenizer cannot write, and nothing ends the request (ignore_eos?)"
    )
