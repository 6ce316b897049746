"""The GPU sampler: greedy and random rows, filtered or not, without copies or synchronization."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve.engine.executor import SlotUpdate
from nanoserve.kernels.triton.choose_tokens import SETTINGS_WORDS, choose_tokens, pack_settings
from nanoserve.kernels.triton.filter_logits import filter_borders
from nanoserve.sampling.host_copies import copy_into, to_device
from nanoserve.sampling.rows import Rows
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling.settings import Program, last_of
from nanoserve.sampling.token_masks import are_empty, error_of_none, fill_masks

if TYPE_CHECKING:
    from nanoserve.sampling.processors import BatchProcessor


class FusedSampler(Sampler):
    """A sampler with settings (temperatures, seeds, filters) on the device, copied after a change.

    The kernel reads the slots and positions of a step's rows from the batch itself.

    is_dependent: use programmatic dependent launch.
    """

    direct = Program.FILTERED
    masks_directly = True

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        processors: "Sequence[BatchProcessor]" = (),
        *,
        is_dependent: bool = False,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        super().__init__(num_slots, vocab_size, device, processors, logprobs_mode=logprobs_mode)
        self._is_dependent = is_dependent
        self._host = torch.zeros(num_slots, SETTINGS_WORDS.value, dtype=torch.int32)
        self._on_device = torch.zeros_like(self._host, device=device)
        self._is_stale = False

    def set_slot(self, update: SlotUpdate) -> None:
        super().set_slot(update)
        settings = self._settings[update.slot]
        filters = (int(settings["top_k"]), float(settings["top_p"]), float(settings["min_p"]))
        temperature = float(settings["temperature"])
        words = pack_settings(temperature, update.seed, update.completion, *filters)
        self._host[update.slot] = torch.from_numpy(words)
        self._is_stale = True

    def can_capture(self, slots: np.ndarray) -> bool:
        """Return True if `choose` alone can sample these slots in any step."""
        settings = self._settings[slots]
        return bool(
            last_of(settings["program"]) <= Program.RACE
            and not settings["has_grammar"].any()
            and (settings["num_logprobs"] < 0).all()
        )

    def choose(
        self,
        logits: torch.Tensor,
        row_slots: torch.Tensor,
        row_positions: torch.Tensor,
        borders: torch.Tensor | None = None,
        masks: torch.Tensor | None = None,
        mask_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run `choose_tokens` with the settings on the device: see `update_settings`."""
        return choose_tokens(
            *(logits, row_slots, row_positions, self._on_device, borders, masks, mask_rows),
            is_dependent=self._is_dependent,
        )

    def update_settings(self) -> None:
        """Copy the settings to the device if any has changed since the last copy.

        The copy is asynchronous, and from a separate buffer, since `_host` may change before it
        runs.
        """
        if self._is_stale:
            copy_into(self._on_device, self._host.numpy())
            self._is_stale = False

    def _choose(self, logits: torch.Tensor, rows: Rows, last: int) -> torch.Tensor:
        self.update_settings()
        tensors = rows.tensors
        if tensors is None:  # only some rows of the step
            arrays = (array.astype(np.int32) for array in (rows.slots, rows.positions))
            row_slots, row_positions = to_device(logits.device, *arrays)
        else:
            row_slots = tensors.output_slots[: len(logits)]
            row_positions = tensors.positions[tensors.output_rows[: len(logits)]] + 1
        borders = None
        if last == Program.FILTERED:
            is_dependent = self._is_dependent
            borders = filter_borders(logits, row_slots, self._on_device, is_dependent=is_dependent)
        return self.choose(logits, row_slots, row_positions, borders, *self._fill_masks(rows))

    def _filter(self, logits: torch.Tensor, rows: Rows) -> None:
        """Filter with the borders that the sampling kernel uses, not with those of the stage.

        The kernel's division by the temperature may differ from torch's in its last bits, but a
        token that the kernel can sample must not be filtered here: hence the tolerance.
        """
        self.update_settings()
        slots = rows.slots.astype(np.int32)
        row_slots, temperatures = to_device(
            logits.device, slots, rows.settings["temperature"].copy()
        )
        borders = filter_borders(
            logits, row_slots, self._on_device, is_dependent=self._is_dependent
        )
        logits /= temperatures.unsqueeze(1)
        borders -= borders.abs() * 2.0**-21
        logits.masked_fill_(logits < borders.unsqueeze(1), -torch.inf)

    def _fill_masks(self, rows: Rows) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the token masks of these rows, and the index of the mask of each row.

        The masks are filled while the GPU runs the model; nothing waits for it.
        """
        masked = [row for row, mask in enumerate(rows.masks) if mask is not None]
        if not masked:
            return None, None
        masks = [mask for mask in rows.masks if mask is not None]
        words, failed = fill_masks(masks, self._vocab_size)
        for number, error in failed.items():
            rows.fail(masked[number], error)
        for number in np.flatnonzero(are_empty(words, self._vocab_size)).tolist():
            rows.fail(masked[number], error_of_none())
        mask_rows = np.full(len(rows.slots), -1, dtype=np.int32)
        mask_rows[masked] = np.arange(len(masked))
        all_words, of_rows = to_device(self._on_device.device, words, mask_rows)
        return all_words, of_rows
