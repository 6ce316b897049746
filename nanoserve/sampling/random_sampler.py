"""Drawing a token at random: temperature, then the filters, then the race."""

import numpy as np
import torch

from nanoserve.sampling.filters import apply_filters
from nanoserve.sampling.noise import ExponentialRace, row_keys
from nanoserve.sampling_params import SamplingParams


class RandomSampler:
    """The settings of the slots that sample, and the draw for many rows at once."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._temperature = np.ones(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._stream = np.zeros(num_slots, dtype=np.uint32)
        self._race = ExponentialRace(vocab_size, device)

    def set_slot(self, slot: int, params: SamplingParams, seed: int, stream: int) -> None:
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = seed % 2**64
        self._stream[slot] = stream

    def draw(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Token ids [num_rows] for a float32 copy of the rows' logits, which is overwritten.

        slots and positions: [num_rows], the row's slot and the position of its new token.
        """
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
