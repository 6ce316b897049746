"""The CPU sampler with numba samples each row in one pass, without a copy of its logits."""

import numpy as np
import torch

from nanoserve.kernels.cpu.choose_tokens import FEW, choose_tokens
from nanoserve.sampling.rows import Rows, tensor_of
from nanoserve.sampling.sampler import Sampler, best_tokens
from nanoserve.sampling.settings import Program
from nanoserve.sampling.stages import apply_stages


class NumbaSampler(Sampler):
    """A sampler with the same noise as `Sampler`, except for the last bit of its logarithms."""

    direct = Program.RACE

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernel for logits of this dtype, before the first request."""
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
            # Filters apply to logits divided by the temperature; so the kernel then divides by 1.
            is_greedy = temperatures == 0
            logits /= tensor_of(np.where(is_greedy, 1, temperatures), logits).unsqueeze(1)
            temperatures[~is_greedy] = 1
            apply_stages([stage for stage in self._draws if stage.name == "filters"], logits, rows)
        return _race(logits, rows, temperatures)


def _race(logits: torch.Tensor, rows: Rows, temperatures: np.ndarray) -> torch.Tensor:
    logits = logits.contiguous()  # rows are strided if ranks have unequal parts of the vocabulary
    seeds, completions = rows.settings["seed"].copy(), rows.settings["completion"].copy()
    positions = rows.positions.astype(np.int64)
    return torch.from_numpy(choose_tokens(logits, temperatures, seeds, positions, completions))
