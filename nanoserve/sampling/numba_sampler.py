"""The sampler of a CPU with numba: what is drawn is drawn in one pass, without a copy."""

from typing import Any

import numpy as np
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.kernels_cpu.choose_tokens import FEW, choose_tokens
from nanoserve.sampling.greedy import best_tokens
from nanoserve.sampling.rows import tensor_of
from nanoserve.sampling.sampler import Sampler


class NumbaSampler(Sampler):
    """Draws as `Sampler` does, with the same noise, but for the last bit of its logarithms."""

    def set_slot(self, change: SlotUpdate) -> None:
        super().set_slot(change)
        is_filtered = self._settings["is_filtered"][change.slot]
        self._is_plain[change.slot] = self._states[change.slot] is None and not is_filtered

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile for logits of this dtype, before anybody waits for it."""
        for num_rows in (1, FEW // self._vocab_size + 2):
            logits = torch.zeros(num_rows, self._vocab_size, dtype=dtype)
            rows = np.zeros(num_rows, dtype=np.int64)
            self._race(logits, self._settings[rows], np.ones(num_rows, dtype=np.float32), rows)

    def _choose_plain(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, tensors: Any = None
    ) -> torch.Tensor:
        settings = self._settings[slots]
        temperatures = settings["temperature"].copy()
        if not temperatures.any():
            return best_tokens(logits)
        return self._race(logits, settings, temperatures, positions)

    def _choose(
        self, logits: torch.Tensor, settings: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        temperatures = settings["temperature"].copy()
        if settings["is_filtered"].any():
            is_greedy = temperatures == 0
            logits /= tensor_of(np.where(is_greedy, 1, temperatures), logits).unsqueeze(1)
            temperatures[~is_greedy] = 1
            self._filter(logits, settings)
        return self._race(logits, settings, temperatures, positions)

    def _race(
        self,
        logits: torch.Tensor,
        settings: np.ndarray,
        temperatures: np.ndarray,
        positions: np.ndarray,
    ) -> torch.Tensor:
        logits = logits.contiguous()  # of ranks with unequal shares, rows lie apart
        seeds, completions = settings["seed"].copy(), settings["completion"].copy()
        places = positions.astype(np.int64)
        return torch.from_numpy(choose_tokens(logits, temperatures, seeds, places, completions))
