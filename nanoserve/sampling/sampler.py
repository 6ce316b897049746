"""One token for each row of logits, each row under its own request's settings."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.filters import apply_filters
from nanoserve.sampling.noise import ExponentialRace, row_keys
from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.sampling.processors import SlotState

_GREEDY_BELOW = 1e-5  # dividing logits by less than this would overflow, and means greedy anyway


class Sampler:
    """Keeps each slot's settings, so that a step sends only those of newly admitted sequences.

    Greedy rows cost an argmax. Rows that sample, that have filters, or whose logits are changed
    first, are taken out and worked on together; nobody pays for what only a neighbour asks for.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._stream = np.zeros(num_slots, dtype=np.uint32)
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)  # -1: none asked for
        self.num_prompt_logprobs = np.zeros(num_slots, dtype=np.int64)
        self._is_processed = np.zeros(num_slots, dtype=bool)  # by nanoserve.sampling.processors
        self._states: dict[int, SlotState] = {}
        self._race = ExponentialRace(vocab_size, device)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        stream: int = 0,
        state: "SlotState | None" = None,
    ) -> None:
        """The sequence in `slot` is a new one. `state` is there if its logits are changed."""
        is_greedy = params.temperature < _GREEDY_BELOW
        self._temperature[slot] = 0 if is_greedy else params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = seed % 2**64
        self._stream[slot] = stream
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.num_prompt_logprobs[slot] = params.prompt_logprobs or 0
        self._is_processed[slot] = state is not None
        self._states[slot] = state

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
        rows = np.flatnonzero(self._temperature[slots] > 0)
        if len(rows):
            index = torch.from_numpy(rows).to(logits.device)
            token_ids[index] = self._draw(logits[index].float(), slots[rows], positions[rows])
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
        from nanoserve.sampling.processors import apply_processors

        index = torch.from_numpy(rows).to(logits.device)
        changed = logits[index].float()
        apply_processors(changed, [self._states[slot] for slot in slots[rows]])
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        logits[index] = changed
        return logits

    def _draw(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """Tokens for rows that all sample; `logits` is a float32 copy of theirs."""
        logits /= torch.from_numpy(self._temperature[slots]).to(logits.device).unsqueeze(1)
        top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        rows = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
        if len(rows):
            index = torch.from_numpy(rows).to(logits.device)
            filtered = logits[index]
            settings = (torch.from_numpy(x[rows]).to(logits.device) for x in (top_k, top_p, min_p))
            apply_filters(filtered, *settings)
            logits[index] = filtered
        return self._race.draw(logits, row_keys(self._seed[slots], positions, self._stream[slots]))
