"""The sampler of a CPU with numba: what is drawn is drawn in one pass, without a copy."""

import numpy as np
import torch

from nanoserve.kernels.cpu.choose_tokens import FEW, choose_tokens
from nanoserve.sampling.greedy import best_tokens
from nanoserve.sampling.rows import Rows, tensor_of
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling.settings import Program
from nanoserve.sampling.stages import apply_stages


class NumbaSampler(Sampler):
    """Draws as `Sampler` does, with the same noise, but for the last bit of its logarithms."""

    direct = Program.RACE

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile for logits of this dtype, before anybody waits for it."""
        for num_rows in (1, FEW // self._vocab_size + 2):
            logits = torch.zeros(num_rows, self._vocab_size, dtype=dtype)
            slots = np.zeros(num_rows, dtype=np.int64)
            rows = Rows(self._settings[slots], slots, slots, tensors=None, errors={})
            _race(logits, rows, np.ones(num_rows, dtype=np.float32))

    def _choose(self, logits: torch.Tensor, rows: Rows, last: int) -> torch.Tensor:
        if last == Program.GREEDY:
            return best_tokens(logits)
        temperatures = rows.settings["temperature"].copy()
        if last == Program.FILTERED:
            # Filters are of logits that are divided already; the kernel then divides by 1.
            is_greedy = temperatures == 0
            logits /= tensor_of(np.where(is_greedy, 1, temperatures), logits).unsqueeze(1)
            temperatures[~is_greedy] = 1
            apply_stages([stage for stage in self._draws if stage.name == "filters"], logits, rows)
        return _race(logits, rows, temperatures)


def _race(logits: torch.Tensor, rows: Rows, temperatures: np.ndarray) -> torch.Tensor:
    logits = logits.contiguous()  # of ranks with unequal shares, rows lie apart
    seeds, completions = rows.settings["seed"].copy(), rows.settings["completion"].copy()
    positions = rows.positions.astype(np.int64)
    return torch.from_numpy(choose_tokens(logits, temperatures, seeds, positions, completions))
