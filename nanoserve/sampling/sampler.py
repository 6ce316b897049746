"""One token for each row of logits, each row under its own request's settings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.sampling.processors import BatchProcessor, SlotState
    from nanoserve.sampling.random_sampler import RandomSampler


class Sampler:
    """Keeps each slot's settings, so that a step sends only those of newly admitted sequences.

    A greedy row costs an argmax. Rows that sample, rows whose logits are changed first and rows
    that want log-probabilities are taken out and worked on together, by modules that are loaded
    when the first request asks: nobody pays for what only a neighbour wants.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        processors: "Sequence[BatchProcessor]" = (),
    ) -> None:
        self.processors = processors  # the engine's own: with them, every slot has a state
        self._random_settings = (num_slots, vocab_size, device)
        self._random: RandomSampler | None = None
        self._is_random = np.zeros(num_slots, dtype=bool)
        self._states: list[SlotState | None] = [None] * num_slots  # None: logits stay as they are
        self._is_processed = np.zeros(num_slots, dtype=bool)
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)  # -1: none asked for
        self.num_prompt_logprobs = np.zeros(num_slots, dtype=np.int64)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        stream: int = 0,
        state: "SlotState | None" = None,
    ) -> None:
        """The sequence in `slot` is a new one. `state` is there if its logits are to be changed."""
        self._is_random[slot] = not params.is_greedy
        if self._is_random[slot]:
            if self._random is None:
                from nanoserve.sampling.random_sampler import RandomSampler

                self._random = RandomSampler(*self._random_settings)
            self._random.set_slot(slot, params, seed, stream)
        self._states[slot], self._is_processed[slot] = state, state is not None
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = params.prompt_logprobs or 0

    def sample(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """Token ids [num_rows].

        logits: [num_rows, vocab_size], in the model's dtype; they are left as they are. slots and
        positions: [num_rows], the row's slot and the position that its new token will have.
        """
        processed = np.flatnonzero(self._is_processed[slots])
        if len(processed):
            logits = self._process(logits, processed, slots)
        token_ids = logits.argmax(dim=-1)
        rows = np.flatnonzero(self._is_random[slots])
        if len(rows):
            index = torch.from_numpy(rows).to(logits.device)
            drawn = self._random.draw(logits[index].float(), slots[rows], positions[rows])
            token_ids[index] = drawn
        for row in processed:
            self._states[slots[row]].append(int(token_ids[row]))
        return token_ids

    def logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, slots: np.ndarray
    ) -> TokenLogprobs | None:
        """Log-probabilities at the rows that asked for them, as many as the most curious asked.

        `logits` are those that `sample` was given, and `token_ids` what it returned.
        """
        wanted = self._num_logprobs[slots]
        rows = np.flatnonzero(wanted >= 0)
        if not len(rows):
            return None
        from nanoserve.sampling.logprobs import gather_logprobs

        index = torch.from_numpy(rows).to(logits.device)
        return gather_logprobs(logits[index], token_ids[index], int(wanted.max()))

    def _process(self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray) -> torch.Tensor:
        """A float32 copy of all rows, in which `rows` are changed as their requests ask."""
        from nanoserve.sampling.processors import apply_processors

        logits = logits.to(torch.float32, copy=True)
        index = torch.from_numpy(rows).to(logits.device)
        changed = logits[index]
        apply_processors(changed, [self._states[slot] for slot in slots[rows]], self.processors)
        logits[index] = changed
        return logits
