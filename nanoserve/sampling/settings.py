"""The table of sampling settings by slot, so that one index selects a step's rows."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling_params import SamplingParams


class Program(IntEnum):
    """The processing that a row's logits need until its token is sampled.

    Each program includes the programs before it. A sampler reads unmodified logits for programs up
    to `Sampler.direct`; for later programs, it first copies the rows in float32.
    """

    GREEDY = 0  # argmax
    RACE = 1  # divided by the temperature, minus noise, argmax
    FILTERED = 2  # min_p, top_k and top_p between temperature and noise
    GENERAL = 3  # stages change the logits first: see `nanoserve.sampling.stages`


class Settings(NamedTuple):
    temperature: float  # 0 is greedy
    top_k: int
    top_p: float
    min_p: float
    seed: int
    completion: int
    num_logprobs: int  # -1: no log-probabilities
    stages: int  # which stages its logits go through, a bit for each: see `Stage.bit`
    program: int  # the `Program` of its rows
    draw: int  # the rest of it after stages have changed the logits: at most FILTERED
    has_grammar: bool  # whether a step may bring a token mask for it


_TYPES = ("f4", "i8", "f4", "f4", "u8", "u4", "i8", "u8", "u1", "u1", "?")
SETTINGS = np.dtype(list(zip(Settings._fields, _TYPES, strict=True)))


def draw_of(params: SamplingParams) -> Program:
    """Return the program of a row whose logits no stage changes."""
    if params.is_greedy:
        return Program.GREEDY
    return Program.FILTERED if params.filters_logits else Program.RACE


def last_of(programs: np.ndarray) -> int:
    """Return the largest of some programs as a Python int: numpy compares enums slowly."""
    return int(np.maximum.reduce(programs))


def settings_of(
    update: SlotUpdate, stages: int, is_changed: bool, processes_logprobs: bool = False
) -> Settings:
    """Return a slot's row.

    is_changed: True if one of `stages` comes before the temperature. processes_logprobs: True if
    log-probabilities are those of the changed logits; such a row needs the copy, too.
    """
    params = update.params
    draw = draw_of(params)
    is_copied = is_changed or (processes_logprobs and params.logprobs is not None)
    return Settings(
        temperature=0.0 if params.is_greedy else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=update.seed % 2**64,
        completion=update.completion,
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        stages=stages,
        program=Program.GENERAL if is_copied else draw,
        draw=draw,
        has_grammar=params.structured_outputs is not None,
    )
