"""The sampler of a GPU: greedy and random rows, filtered or not, without a copy or a wait."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanoserve.engine.executor import TokenMask, SlotUpdate
from nanoserve.kernels.choose_tokens import SETTINGS_WORDS, choose_tokens, pack_settings
from nanoserve.kernels.filter_logits import filter_borders
from nanoserve.sampling.masks import error_of_none, fill_masks, places_of
from nanoserve.sampling.sampler import _NONE, Sampled, Sampler

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
        self._is_guided = np.zeros(num_slots, dtype=bool)  # has a grammar
        self._limits: dict[int, TokenMask] = {}  # of the step that is sampled
        self._errors: dict[
            int, Exception
        ] = {}  # by row of those that take their logits as they are

    def set_slot(self, change: SlotUpdate) -> None:
        super().set_slot(change)
        settings = self._settings[change.slot]
        filters = (int(settings["top_k"]), float(settings["top_p"]), float(settings["min_p"]))
        temperature = float(settings["temperature"])
        words = pack_settings(temperature, change.seed, change.completion, *filters)
        self._host[change.slot] = torch.from_numpy(words)
        self._is_plain[change.slot] = self._states[change.slot] is None
        self._is_guided[change.slot] = change.params.structured_outputs is not None
        self._is_stale = True

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        tensors: Any = None,
        draft_tokens: Mapping[int, list[int]] = _NONE,
        token_masks: Mapping[int, TokenMask] = _NONE,
    ) -> Sampled:
        """The model is still at work: masks are filled meanwhile, and nobody waits for it."""
        for slot in {*draft_tokens, *token_masks}:
            state = self._states[slot]
            if state is not None:
                state.prepare(draft_tokens.get(slot, []), token_masks.get(slot))
        masks = {slot: m for slot, m in token_masks.items() if self._states[slot] is None}
        if not masks:
            return self.sample_freely(logits, slots, positions, tensors)
        self._limits, self._errors = masks, {}
        try:
            sampled = self.sample_freely(logits, slots, positions, tensors)
        finally:
            self._limits = {}
        plain = np.flatnonzero(self._is_plain[slots])
        errors = {int(plain[row]): error for row, error in self._errors.items()}
        return sampled._replace(errors=sampled.errors | errors)

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
        return self.choose(logits, row_slots, row_positions, borders, *self._masks(logits, slots))

    def are_plain(self, slots: np.ndarray) -> bool:
        """Whether `choose` is all that these rows ask for."""
        settings = self._settings[slots]
        return bool(
            self._is_plain[slots].all()
            and not self._is_guided[slots].any()
            and not settings["is_filtered"].any()
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
        """`choose_tokens` by the settings on the device: see `update_settings`."""
        settings = self._on_device
        return choose_tokens(logits, row_slots, row_positions, settings, borders, masks, mask_rows)

    def _masks(
        self, logits: torch.Tensor, slots: np.ndarray
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of these rows, which take their logits as they are, and which mask each goes by."""
        places = places_of([self._limits.get(slot) for slot in slots.tolist()])
        if not places:
            return None, None
        masks, failed = fill_masks(places.values(), self._vocab_size)
        rows = list(places)
        self._errors = {rows[number]: error for number, error in failed.items()}
        # Behind the vocabulary a word may have bits of tokens that the model does not have.
        words = np.full(masks.shape[1], -1, dtype=np.int32)
        words[-1] = (1 << (self._vocab_size - 1) % 32 + 1) - 1 if self._vocab_size % 32 else -1
        for number in np.flatnonzero(~(masks & words).any(axis=1)):
            self._errors[rows[number]] = error_of_none()
        mask_rows = np.full(len(slots), -1, dtype=np.int32)
        mask_rows[rows] = np.arange(len(rows))
        return self._to_device(torch.from_numpy(masks)), self._to_device(
            torch.from_numpy(mask_rows)
        )

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
            self._on_device.copy_(self._staged(self._host), non_blocking=True)
            self._is_stale = False

    def _staged(self, host: torch.Tensor) -> torch.Tensor:
        """Memory that a GPU can read without being waited for."""
        return host.pin_memory() if self._on_device.device.type == "cuda" else host

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        return self._staged(host).to(self._on_device.device, non_blocking=True)
