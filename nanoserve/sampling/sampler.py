"""One token for each row of logits, each row under its own request's settings."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling_params import SlotParams

if TYPE_CHECKING:
    from nanoserve.sampling.processors import BatchProcessor
    from nanoserve.sampling.special_rows import SpecialRows

_CHUNK = 1024  # of a vocabulary; see `best_tokens`


class Sampler:
    """Keeps each slot's settings, so that a step sends only those of newly admitted sequences.

    A greedy row costs an argmax. Rows that sample, rows whose logits are changed first and rows
    that want log-probabilities are special: they are taken out and worked on together, by a module
    that is loaded when the first of them comes. Nobody pays for what only a neighbour wants.
    """

    _chooses_at_random = False  # whether `_choose` gives rows that sample their token, too

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        processors: "Sequence[BatchProcessor]" = (),
    ) -> None:
        self._settings = (num_slots, vocab_size, device, processors)
        self._processes_all = bool(processors)  # the engine's own processors see every row
        self.special: SpecialRows | None = None
        self._is_special = np.zeros(num_slots, dtype=bool)

    def set_slot(self, change: SlotParams) -> None:
        """The sequence in a slot is a new one."""
        params = change.params
        wants_logprobs = (params.logprobs, params.prompt_logprobs) != (None, None)
        is_changed = params.changes_logits or self._processes_all
        is_chosen = params.is_greedy or self._chooses_at_random
        is_special = wants_logprobs or is_changed or not is_chosen
        if is_special and self.special is None:
            from nanoserve.sampling.special_rows import SpecialRows

            self.special = SpecialRows(*self._settings, draws=not self._chooses_at_random)
        if self.special is not None:
            self.special.set_slot(change)
        self._is_special[change.slot] = is_special

    def sample(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[torch.Tensor, TokenLogprobs | None]:
        """Token ids [num_rows], and the log-probabilities of the rows that asked for them.

        logits: [num_rows, vocab_size], in the model's dtype; they are left as they are. slots and
        positions: [num_rows], the row's slot and the position that its new token will have.
        """
        token_ids = self._choose(logits, slots)
        rows = np.flatnonzero(self._is_special[slots])
        if not len(rows):
            return token_ids, None
        index = torch.from_numpy(rows).to(logits.device)
        logits, slots = logits[index], slots[rows]
        token_ids[index] = chosen = self.special.sample(
            logits, token_ids[index], slots, positions[rows]
        )
        return token_ids, self.special.logprobs(logits, chosen, slots)

    def record(self, slots: np.ndarray, token_ids: list[int]) -> None:
        """The sequences in `slots` have got these tokens."""
        if self.special is not None:
            self.special.record(slots, token_ids)

    def _choose(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """What every row gets at first, and most rows keep."""
        return best_tokens(logits)


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """int64 [num_rows]: each row's argmax, the first among equals.

    On a CPU `amax` alone reads a vocabulary as fast as memory gives it, and it does not say where
    the maximum is. So it chooses a chunk, and `max`, twice as slow, only looks through that.
    """
    vocab_size = logits.shape[1]
    if vocab_size <= _CHUNK:
        return logits.max(dim=-1).indices
    chunks = logits[:, : vocab_size // _CHUNK * _CHUNK].unflatten(1, (-1, _CHUNK))
    rest = logits[:, -_CHUNK:]  # what it shares with the chunk before, that one has won already
    highest = torch.cat([chunks.amax(-1), rest.amax(-1, keepdim=True)], dim=1)
    start = highest.max(-1, keepdim=True).indices.mul_(_CHUNK).clamp_(max=vocab_size - _CHUNK)
    chosen = logits.gather(1, start + torch.arange(_CHUNK, device=logits.device))
    return start[:, 0] + chosen.max(dim=-1).indices
