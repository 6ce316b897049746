"""The sampler of a GPU: greedy and random rows, filtered or not, without a copy or a wait."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve.kernels.choose_tokens import SETTINGS_WORDS, choose_tokens, pack_settings
from nanoserve.kernels.filter_logits import filter_borders
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling_params import SlotParams

if TYPE_CHECKING:
    from nanoserve.sampling.processors import BatchProcessor
    from nanoserve.worker.model_runner import BatchTensors


class FusedSampler(Sampler):
    """Keeps temperatures, seeds and filters on the device, by slot; they travel when one changes.

    Which slots and positions the rows of a step have, the kernel reads from the batch itself.
    """

    _chooses_at_random = True

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        processors: "Sequence[BatchProcessor]" = (),
    ) -> None:
        super().__init__(num_slots, vocab_size, device, processors)
        # Pinned, so that the copy below does not wait. A step is collected before the next one
        # changes a slot, so nothing is overwritten on its way.
        self._host = torch.zeros(
            num_slots, SETTINGS_WORDS.value, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._on_device = torch.zeros_like(self._host, device=device)
        self._is_stale = False
        self._is_filtered = np.zeros(num_slots, dtype=bool)
        self.tensors: BatchTensors | None = None  # the batch on the device: set by the runner

    def set_slot(self, change: SlotParams) -> None:
        super().set_slot(change)
        params = change.params
        temperature = 0.0 if params.is_greedy else params.temperature
        filters = (params.top_k, params.top_p, params.min_p)
        settings = pack_settings(temperature, change.seed, change.stream, *filters)
        self._host[change.slot] = torch.from_numpy(settings)
        self._is_stale = True
        is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self._is_filtered[change.slot] = is_filtered and not params.is_greedy

    def _choose(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        if self._is_stale:
            self._on_device.copy_(self._host, non_blocking=True)
            self._is_stale = False
        tensors, rows = self.tensors, len(logits)
        positions = tensors.positions[tensors.logits_rows[:rows]] + 1
        row_slots, borders = tensors.slots[:rows], None
        if self._is_filtered[slots].any():
            borders = filter_borders(logits, row_slots, self._on_device)
        return choose_tokens(logits, row_slots, positions, self._on_device, borders)
