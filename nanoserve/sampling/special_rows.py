"""Rows of a step that want more than their most likely token.

Their logits are changed first, or they are drawn at random, or somebody wants to know the
log-probabilities. Each of these loads its own module when the first request asks.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.sampler import best_tokens
from nanoserve.sampling_params import SlotParams

if TYPE_CHECKING:
    from nanoserve.sampling.processors import BatchProcessor, SlotState
    from nanoserve.sampling.random_sampler import RandomSampler


class SpecialRows:
    """Per slot: how to change its logits, how to draw, and which log-probabilities it wants."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        processors: "Sequence[BatchProcessor]" = (),
        draws: bool = True,
    ) -> None:
        """`draws` is False if rows whose logits stay as they are come with their token drawn."""
        self._draws = draws
        self._random_settings = (num_slots, vocab_size, device)
        self._processors = processors
        self._rows_at_once = num_slots
        self._random: RandomSampler | None = None
        self._is_random = np.zeros(num_slots, dtype=bool)
        self._states: list[SlotState | None] = [None] * num_slots  # None: logits stay as they are
        self._has_state = np.zeros(num_slots, dtype=bool)
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)  # -1: none asked for
        self._num_prompt_logprobs = np.zeros(num_slots, dtype=np.int64)

    def set_slot(self, change: SlotParams) -> None:
        """The sequence in a slot is a new one."""
        slot, params = change.slot, change.params
        self._is_random[slot] = not params.is_greedy
        if self._is_random[slot]:
            if self._random is None:
                from nanoserve.sampling.random_sampler import RandomSampler

                self._random = RandomSampler(*self._random_settings)
            self._random.set_slot(slot, params, change.seed, change.stream)
        self._states[slot] = None
        if params.changes_logits or self._processors:
            from nanoserve.sampling.processors import SlotState

            self._states[slot] = SlotState(
                params,
                change.prompt_token_ids,
                change.output_token_ids,
                change.stop_token_ids,
                change.bad_words_token_ids,
            )
        self._has_state[slot] = self._states[slot] is not None
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._num_prompt_logprobs[slot] = params.prompt_logprobs or 0

    def sample(
        self,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
    ) -> torch.Tensor:
        """Token ids [num_rows], for logits [num_rows, vocab_size], which are left as they are.

        `chosen` [num_rows] is what rows keep that only want log-probabilities.
        """
        with_state, at_random = self._has_state[slots], self._is_random[slots]
        rows = np.flatnonzero(with_state | (at_random & self._draws))
        if not len(rows):
            return chosen
        index = torch.from_numpy(rows).to(logits.device)
        changed = self._process(logits[index].float(), slots[rows])
        token_ids = chosen.clone()
        token_ids[index] = best_tokens(changed)
        drawn = np.flatnonzero(at_random[rows])
        if len(drawn):
            part = torch.from_numpy(drawn).to(logits.device)
            rows = rows[drawn]
            token_ids[index[part]] = self._random.draw(changed[part], slots[rows], positions[rows])
        return token_ids

    def _process(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Change, in place, the rows whose requests ask for it."""
        rows = np.flatnonzero(self._has_state[slots])
        if len(rows):
            from nanoserve.sampling.processors import apply_processors

            index = torch.from_numpy(rows).to(logits.device)
            changed = logits[index]
            states = [self._states[slot] for slot in slots[rows]]
            apply_processors(changed, states, self._processors)
            logits[index] = changed
        return logits

    def record(self, slots: np.ndarray, token_ids: list[int]) -> None:
        """The sequences in `slots` have got these tokens."""
        for row in np.flatnonzero(self._has_state[slots]):
            self._states[slots[row]].append(token_ids[row])

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, slots: np.ndarray
    ) -> TokenLogprobs | None:
        """At the rows that asked for them, as many as the most curious of them asked.

        `logits` are the model's own, whatever was done to a copy of them before sampling.
        """
        wanted = self._num_logprobs[slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return None
        from nanoserve.sampling.logprobs import gather_logprobs

        index = torch.from_numpy(rows).to(logits.device)
        return gather_logprobs(logits[index], token_ids[index], int(wanted.max()))

    def prompt_logprobs(
        self,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        slots: np.ndarray,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> TokenLogprobs:
        """Of the tokens `next_ids` [num_rows] that follow `hidden` [num_rows, hidden_size].

        In slices of as many rows as decoding ever has: those bound the memory of the logits.
        """
        from nanoserve.sampling.logprobs import concatenate, gather_logprobs

        k, size = int(self._num_prompt_logprobs[slots].max()), self._rows_at_once
        return concatenate(
            [
                gather_logprobs(compute_logits(rows), ids, k)
                for rows, ids in zip(hidden.split(size), next_ids.split(size), strict=True)
            ]
        )
