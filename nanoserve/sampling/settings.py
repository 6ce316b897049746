"""How each slot is sampled, as one row of a table, so that a step takes its rows with one index."""

from typing import NamedTuple

import numpy as np

from nanoserve.engine.executor import SlotUpdate


class Settings(NamedTuple):
    temperature: float  # 0 is greedy
    top_k: int
    top_p: float
    min_p: float
    is_filtered: bool  # whether one of these three leaves something out
    seed: int
    completion: int
    num_logprobs: int  # -1: none asked for
    is_changed: bool  # whether it has a `SlotState`


_TYPES = ("f4", "i8", "f4", "f4", "?", "u8", "u4", "i8", "?")
SETTINGS = np.dtype(list(zip(Settings._fields, _TYPES, strict=True)))


def settings_of(change: SlotUpdate, is_changed: bool) -> Settings:
    params = change.params
    return Settings(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        is_filtered=params.filters_logits,
        seed=change.seed % 2**64,
        completion=change.completion,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        is_changed=is_changed,
    )
