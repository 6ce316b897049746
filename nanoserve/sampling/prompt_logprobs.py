"""The head that computes the log-probabilities of a prompt's tokens."""

from collections.abc import Callable

import numpy as np
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.logprobs import LogprobTensors, gather_logprobs


class PromptLogprobs:
    """The log-probabilities of all prompt tokens but the first, given the tokens before each."""

    def __init__(self, num_slots: int) -> None:
        self._rows_at_once = num_slots
        self._num_logprobs = np.zeros(num_slots, dtype=np.int64)  # by slot

    def set_slot(self, change: SlotUpdate) -> None:
        self._num_logprobs[change.slot] = change.params.prompt_logprobs or 0

    def __call__(
        self,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        slots: np.ndarray,
        compute_logits: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> LogprobTensors | None:
        """Compute log-probabilities in slices, which bound the memory of the logits.

        A slice has as many rows as a decode step can have.
        """
        k, size = self._num_logprobs[slots], self._rows_at_once
        most, parts = int(k.max()), []
        for first in range(0, len(hidden), size):
            rows = slice(first, first + size)
            logits = compute_logits(hidden[rows])
            if logits is not None:  # on rank 0
                parts.append(gather_logprobs(logits, next_ids[rows], k[rows], most))
        if not parts:
            return None
        return LogprobTensors(*map(torch.cat, zip(*parts, strict=True))).to_host()

    def collect(self, made: LogprobTensors) -> TokenLogprobs:
        return made.numpy()
