"""The sampler of a GPU: greedy and random rows, filtered or not, without a copy or a wait."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanoserve.engine.executor import SlotChange
from nanoserve.kernels.choose_tokens import SETTINGS_WORDS, choose_tokens, pack_settings
from nanoserve.kernels.filter_logits import filter_borders
from nanoserve.sampling.sampler import Sampler

if TYPE_CHECKING:
    from nanoserve.sampling.processors import BatchProcessor


class FusedSampler(Sampler):
    """Keeps temperatures, seeds and filters on the device, by slot; they travel when one changes.

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
        self._host = torch.zeros(num_slots, SETTINGS_WORDS.value, dtype=torch.int32)
        self._on_device = torch.zeros_like(self._host, device=device)
        self._is_stale = False

    def set_slot(self, change: SlotChange) -> None:
        super().set_slot(change)
        settings = self._settings[change.slot]
        filters = (int(settings["top_k"]), float(settings["top_p"]), float(settings["min_p"]))
        temperature = float(settings["temperature"])
        words = pack_settings(temperature, change.seed, change.completion, *filters)
        self._host[change.slot] = torch.from_numpy(words)
        self._is_plain[change.slot] = self._states[change.slot] is None
        self._is_stale = True

    def _choose_plain(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, tensors: Any = None
    ) -> torch.Tensor:
        self.update_settings()
        if tensors is None:  # some of a step's rows
            row_slots, row_positions = (
                torch.from_numpy(array.astype(np.int32)).to(logits.device)
                for array in (slots, positions)
            )
        else:
            row_slots = tensors.output_slots[: len(logits)]
            row_positions = tensors.positions[tensors.output_rows[: len(logits)]] + 1
        borders = None
        if self._settings["is_filtered"][slots].any():
            borders = filter_borders(logits, row_slots, self._on_device)
        return self.choose(logits, row_slots, row_positions, borders)

    def are_plain(self, slots: np.ndarray) -> bool:
        """Whether `choose` is all that these rows ask for."""
        settings = self._settings[slots]
        return bool(
            self._is_plain[slots].all()
            and not settings["is_filtered"].any()
            and (settings["num_logprobs"] < 0).all()
        )

    def choose(
        self,
        logits: torch.Tensor,
        row_slots: torch.Tensor,
        row_positions: torch.Tensor,
        borders: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`choose_tokens` by the settings on the device: see `update_settings`."""
        return choose_tokens(logits, row_slots, row_positions, self._on_device, borders)

    def _choose(
        self, logits: torch.Tensor, settings: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        return self._choose_plain(logits, slots, positions)

    def update_settings(self) -> None:
        """Bring them there, if one has changed since.

        Without waiting, and from memory of its own: the copy may run when `_host` has changed
        again. torch keeps pinned memory until the copies from it are over.
        """
        if self._is_stale:
            is_gpu = self._on_device.device.type == "cuda"
            staged = self._host.pin_memory() if is_gpu else self._host
            self._on_device.copy_(staged, non_blocking=True)
            self._is_stale = False
