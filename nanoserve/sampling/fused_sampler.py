"""The sampler of a GPU: greedy rows and plain temperature rows by one kernel, without a copy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nanoserve.kernels.choose_tokens import choose_tokens, pack_settings
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling_params import SamplingParams, SlotParams

if TYPE_CHECKING:
    from nanoserve.sampling.processors import BatchProcessor
    from nanoserve.worker.model_runner import BatchTensors


class FusedSampler(Sampler):
    """Keeps temperatures and seeds on the device, by slot; they travel when a slot changes.

    Which slots and positions the rows of a step have, the kernel reads from the batch itself.
    """

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
        self._host = torch.zeros(num_slots, 4, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(num_slots, 4, dtype=torch.int32, device=device)
        self._is_stale = False
        self.tensors: BatchTensors | None = None  # the batch on the device: set by the runner

    def set_slot(self, change: SlotParams) -> None:
        super().set_slot(change)
        params = change.params
        temperature = 0.0 if params.is_greedy else params.temperature
        settings = pack_settings(temperature, change.seed, change.stream)
        self._host[change.slot] = torch.from_numpy(settings)
        self._is_stale = True

    def _is_drawn_specially(self, params: SamplingParams) -> bool:
        is_filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        return is_filtered and not params.is_greedy

    def _choose(self, logits: torch.Tensor) -> torch.Tensor:
        if self._is_stale:
            self._on_device.copy_(self._host, non_blocking=True)
            self._is_stale = False
        tensors, rows = self.tensors, len(logits)
        positions = tensors.positions[tensors.logits_rows[:rows]] + 1
        return choose_tokens(logits, tensors.slots[:rows], positions, self._on_device)
