"""One token for each row of logits, each row under its own request's settings."""

import numpy as np
import torch

from nanoserve.sampling.filters import apply_filters
from nanoserve.sampling.noise import ExponentialRace, row_keys
from nanoserve.sampling_params import SamplingParams

_GREEDY_BELOW = 1e-5  # dividing logits by less than this would overflow, and means greedy anyway


class Sampler:
    """Keeps each slot's settings, so that a step sends only those of newly admitted sequences.

    Greedy rows cost an argmax. Rows that sample, and among them rows with filters, are taken out
    and worked on together; nobody pays for what only a neighbour asks for.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._race = ExponentialRace(vocab_size, device)

    def set_slot(self, slot: int, params: SamplingParams, seed: int) -> None:
        """The sequence in `slot` is a new one."""
        self._temperature[slot] = params.temperature if params.temperature >= _GREEDY_BELOW else 0
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = seed % 2**64

    def sample(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """Token ids [num_rows].

        logits: [num_rows, vocab_size], in the model's dtype. slots and positions: [num_rows], the
        row's slot and the position that its new token will have.
        """
        token_ids = logits.argmax(dim=-1)
        rows = np.flatnonzero(self._temperature[slots] > 0)
        if len(rows):
            index = torch.from_numpy(rows).to(logits.device)
            token_ids[index] = self._draw(logits[index].float(), slots[rows], positions[rows])
        return token_ids

    def _draw(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
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
        return self._race.draw(logits, row_keys(self._seed[slots], positions))
