"""One token for each row of logits, each row under its own request's settings.

A row goes through at most five stages, in one pass:

    logits -> changed (masks, biases, penalties) -> / temperature -> filtered -> - log E -> argmax

What a stage does is in a module of its own, which is loaded when the first request asks for it.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanoserve.engine.executor import SlotUpdate, TokenMask
from nanoserve.sampling.greedy import best_tokens
from nanoserve.sampling.rows import rows_of, tensor_of
from nanoserve.sampling.settings import SETTINGS, settings_of

if TYPE_CHECKING:
    from nanoserve.sampling.logprobs import LogprobTensors
    from nanoserve.sampling.processors import BatchProcessor, SlotState


_NONE: Mapping[int, Any] = MappingProxyType({})


class Sampled(NamedTuple):
    """What a step has chosen; tensors may not have been computed yet.

    token_ids: int64 [num_rows], -1 where nothing can be chosen: see `nanoserve.sampling.no_token`.
    logprob_rows: the rows that `logprobs` has entries for, int64 [num_entries].
    states: of the rows that must learn their token, by row. errors: what requests' own processors
    raised, by row; such a row's token means nothing.
    """

    token_ids: torch.Tensor
    logprobs: "LogprobTensors | None"
    logprob_rows: np.ndarray
    states: "list[tuple[int, SlotState]]"
    errors: dict[int, Exception]


class Sampler:
    """Keeps each slot's settings, so that a step sends only those of newly admitted sequences.

    A greedy row costs an argmax. All others are copied once, in float32, and worked on together;
    each stage takes those of them that want it, so nobody pays for what only a neighbour wants.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        processors: "Sequence[BatchProcessor]" = (),
    ) -> None:
        self._settings = np.zeros(num_slots, SETTINGS)
        self._is_plain = np.ones(num_slots, dtype=bool)  # its logits are used as they are
        self._states: list[SlotState | None] = [None] * num_slots
        self._processors = processors  # the engine's own; they see every row
        self._vocab_size = vocab_size
        self._noise: Any = None  # made when the first row samples

    def set_slot(self, change: SlotUpdate) -> None:
        """The sequence in a slot is a new one."""
        state = None
        if change.params.changes_logits or self._processors:
            from nanoserve.sampling.processors import SlotState

            state = SlotState(change)
        self._states[change.slot] = state
        self._settings[change.slot] = settings = settings_of(change, state is not None)
        self._is_plain[change.slot] = state is None and settings.temperature == 0

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        tensors: Any = None,
        draft_tokens: Mapping[int, list[int]] = _NONE,
        token_masks: Mapping[int, TokenMask] = _NONE,
    ) -> Sampled:
        """Choose a token for each row.

        logits: [num_rows, vocab_size], in the model's dtype; they are left as they are. slots and
        positions: [num_rows], the row's slot and the position that its new token will have.
        tensors: the batch on the device, for a sampler that reads these there.
        draft_tokens: by slot; such a slot has a row for its last token and one for each of these.
        token_masks: by slot, what its rows may take.
        """
        for slot in {*draft_tokens, *token_masks}:
            state = self._states[slot]
            if state is not None:
                state.prepare(draft_tokens.get(slot, []), token_masks.get(slot))
        masks = {slot: m for slot, m in token_masks.items() if self._states[slot] is None}
        if masks:
            from nanoserve.sampling.limits import sample_within

            return sample_within(self, logits, slots, positions, tensors, masks)
        return self.sample_freely(logits, slots, positions, tensors)

    def sample_freely(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, tensors: Any = None
    ) -> Sampled:
        """Choose tokens that no mask restricts, but those of rows with a `SlotState`."""
        settings, is_plain = self._settings[slots], self._is_plain[slots]
        plain, rest = np.flatnonzero(is_plain), np.flatnonzero(~is_plain)
        if not len(rest):
            token_ids = self._choose_plain(logits, slots, positions, tensors)
            return Sampled(token_ids, *self._logprobs(logits, token_ids, settings), [], {})
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        if len(plain):
            index = tensor_of(plain, logits)
            token_ids[index] = self._choose_plain(logits[index], slots[plain], positions[plain])
        index = tensor_of(rest, logits)
        own = logits[index].float()
        states = [(row, self._states[slots[row]]) for row in rest if settings["is_changed"][row]]
        errors: dict[int, Exception] = {}
        if states:
            from nanoserve.sampling.processors import apply_processors

            with rows_of(own, np.flatnonzero(settings["is_changed"][rest])) as part:
                errors = apply_processors(part, [s for _, s in states], self._processors)
        token_ids[index] = self._choose(own, settings[rest], slots[rest], positions[rest])
        errors = {int(states[i][0]): error for i, error in errors.items()}
        return Sampled(token_ids, *self._logprobs(logits, token_ids, settings), states, errors)

    # The next two are one kernel on a GPU: see FusedSampler.

    def _choose_plain(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray, tensors: Any = None
    ) -> torch.Tensor:
        return best_tokens(logits)

    def _choose(
        self, logits: torch.Tensor, settings: np.ndarray, slots: np.ndarray, positions: np.ndarray
    ) -> torch.Tensor:
        """logits: float32 [num_rows, vocab_size], the rows' own, which are overwritten."""
        at_random = np.flatnonzero(settings["temperature"] > 0)
        if len(at_random):
            from nanoserve.sampling.noise import Noise, row_keys

            self._noise = self._noise or Noise(self._vocab_size, logits.device)
            settings, positions = settings[at_random], positions[at_random]
            with rows_of(logits, at_random) as part:
                part /= tensor_of(settings["temperature"], logits).unsqueeze(1)
                self._filter(part, settings)
                # An exponential race: token t runs for a time E / p(t), with E drawn from Exp(1)
                # for each, and the first one wins. That is t with probability p(t). In logarithms
                # the winner is argmax(logit - log E), and no softmax is needed.
                keys = row_keys(settings["seed"], positions, settings["completion"])
                self._noise.subtract_log_exponential(part, keys)
        return best_tokens(logits)

    def _filter(self, logits: torch.Tensor, settings: np.ndarray) -> None:
        filtered = np.flatnonzero(settings["is_filtered"])
        if len(filtered):
            from nanoserve.sampling.filters import apply_filters

            names = ("top_k", "top_p", "min_p")
            values = (tensor_of(settings[name][filtered], logits) for name in names)
            with rows_of(logits, filtered) as part:
                apply_filters(part, *values)

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, settings: np.ndarray
    ) -> "tuple[LogprobTensors | None, np.ndarray]":
        """At the rows that asked for them, as many as the most curious of them asked.

        Of the model's own logits, whatever was done to a copy of them.
        """
        rows = np.flatnonzero(settings["num_logprobs"] >= 0)
        if not len(rows):
            return None, rows
        from nanoserve.sampling.logprobs import logprobs_of_rows

        return logprobs_of_rows(logits, token_ids, rows, settings["num_logprobs"].max()), rows
