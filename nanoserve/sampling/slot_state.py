"""The state of the sequence in a slot, which the sampler's stages read."""

import copy
from collections.abc import Iterable, Sequence

import numpy as np

from nanoserve.engine.executor import SlotUpdate


class TokenCounts:
    """The distinct tokens of a sequence, and how often each was generated; O(1) per new token."""

    def __init__(self, prompt_token_ids: list[int], output_token_ids: list[int]) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.empty(256, dtype=np.int64)
        self._counts = np.zeros(256, dtype=np.float32)
        for token_id in prompt_token_ids:
            self._add(token_id, generated=0)
        for token_id in output_token_ids:
            self._add(token_id, generated=1)

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """Number of times that each of `ids` was generated; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._index)]

    def append(self, token_id: int) -> None:
        self._add(token_id, generated=1)

    def copy(self) -> "TokenCounts":
        other = copy.copy(self)
        other._index = dict(self._index)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def _add(self, token_id: int, generated: int) -> None:
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += generated


class SlotState:
    """The state of the sequence in a slot for the sampler's stages.

    It is created on admission, from the prompt and from the tokens generated before a preemption.
    own_stages: names of the registered stages that its rows pass through.
    """

    def __init__(self, update: SlotUpdate, own_stages: Sequence[str] = ()) -> None:
        self.params = params = update.params
        self.prompt_token_ids = update.prompt_token_ids
        self.output_token_ids = list(update.output_token_ids)
        self.own_stages = own_stages
        self.allowed = _ids(params.allowed_token_ids)
        self.stops = _ids(update.stop_token_ids)
        self.bad_words = update.bad_words_token_ids
        self.bias_ids = _ids(params.logit_bias)
        self.bias = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)
        self.counts: TokenCounts | None = None
        if params.has_penalties:
            self.counts = TokenCounts(update.prompt_token_ids, update.output_token_ids)

    def after(self, token_ids: list[int]) -> "SlotState":
        """Return the state after these tokens; this object is not modified."""
        if not token_ids:
            return self
        state = copy.copy(self)
        state.output_token_ids = list(self.output_token_ids)
        state.counts = self.counts and self.counts.copy()
        state.extend(token_ids)
        return state

    def extend(self, token_ids: list[int]) -> None:
        """Append new tokens of the sequence."""
        self.output_token_ids += token_ids
        if self.counts is not None:
            for token_id in token_ids:
                self.counts.append(token_id)

    def forbidden(self) -> np.ndarray:
        """Return the tokens that would complete a bad word now."""
        output = self.output_token_ids
        return _ids(
            word[-1]
            for word in self.bad_words
            if len(word) == 1 or output[-(len(word) - 1) :] == word[:-1]
        )


def _ids(token_ids: Iterable[int] | None) -> np.ndarray:
    return np.array(list(token_ids or ()), dtype=np.int64)
