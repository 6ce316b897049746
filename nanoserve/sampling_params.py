"""What one request asks for, under vLLM's names and with its defaults."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class RequestOutputKind(Enum):
    """What `LLMEngine.step` returns of an unfinished request."""

    CUMULATIVE = "cumulative"  # after every token, all text so far
    DELTA = "delta"  # after every token, only what is new
    FINAL_ONLY = "final_only"  # nothing before the end


@dataclass
class SamplingParams:
    """How to choose a request's tokens and when to stop.

    temperature: 0 (and all below 1e-5) is greedy; otherwise logits are divided by it.
    top_k: only the k most likely tokens; 0 and -1 both mean all of them.
    top_p: only the smallest set of most likely tokens whose probability reaches top_p. The token
        that crosses the border belongs to it (Holtzman et al. 2020, nucleus sampling).
    min_p: only tokens at least min_p times as likely as the most likely one.
    seed: same seed, same tokens, whatever else runs. None: the engine draws one.
    max_tokens: at most this many tokens of output; None is up to `max_model_len`.
    stop_token_ids: end at one of these, besides the model's own EOS.
    ignore_eos: go on past the model's own EOS, as benchmarks do.
    skip_special_tokens: leave special tokens out of the text (they stay in `token_ids`).

    Filters apply in vLLM's order: temperature, min_p, top_k, top_p. Tokens tied with the last
    kept one are kept with it, so the result does not depend on how a sort breaks ties.

    Raises `ValueError` that names the value and the allowed range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Called on construction, and again when a request is made: fields can be assigned to."""
        self._check_number("temperature", 0.0, _FLOAT32_MAX, "finite and >= 0")
        self._check_number("top_p", 0.0, 1.0, "in (0, 1]", open_below=True)
        self._check_number("min_p", 0.0, 1.0, "in [0, 1]")
        self._check_integer("top_k", -1, _INT32_MAX)
        self._check_integer("seed", -(2**63), 2**64 - 1, optional=True)
        self._check_integer("max_tokens", 1, _INT32_MAX, optional=True)
        stops = self.stop_token_ids
        if stops is not None and not (isinstance(stops, (list, tuple)) and all(map(is_int, stops))):
            raise ValueError(f"stop_token_ids={stops!r} must be a list of integers")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValueError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")

    def _check_number(
        self, name: str, low: float, high: float, allowed: str, open_below: bool = False
    ) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        inside = is_number and low <= value <= high  # False for NaN
        if not inside or (open_below and value == low):
            raise ValueError(f"{name}={value!r} must be {allowed}")

    def _check_integer(self, name: str, low: int, high: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if not is_int(value) or not low <= value <= high:
            raise ValueError(f"{name}={value!r} must be an integer in [{low}, {high}]")


def is_int(value: Any) -> bool:
    """True for Python's and numpy's integers; a bool is no number here."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
