"""The sampler samples a token for each row of logits, with the settings of the row's request.

A row passes through those stages of `nanoserve.sampling.stages` that its request needs:

    logits -> changed (masks, biases, penalties) -> / temperature -> filtered -> - log E -> argmax

Most rows need few of them, and sample from the model's unmodified logits: see `Program`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanoserve.engine.executor import SlotUpdate, TokenMask
from nanoserve.sampling.host_copies import to_device
from nanoserve.sampling.rows import Rows, rows_of, tensor_of
from nanoserve.sampling.settings import SETTINGS, Program, last_of, settings_of
from nanoserve.sampling.stages import apply_stages, make_stages

if TYPE_CHECKING:
    from nanoserve.sampling.logprobs import LogprobTensors
    from nanoserve.sampling.processors import BatchProcessor
    from nanoserve.sampling.slot_state import SlotState


_NONE: Mapping[int, Any] = MappingProxyType({})


_CHUNK = 1024  # tokens of the vocabulary


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row, int64 [num_rows], the first among equals; -1 if not finite.

    It is -1 for a row with NaN or infinity anywhere, since a maximum propagates them, and for a row
    in which all logits are -inf.

    On a CPU only `amax` reads a vocabulary at the speed of memory, but it does not return the
    index. So `amax` finds the chunk, and `max`, which is twice as slow, searches only that chunk.
    """
    vocab_size = logits.shape[1]
    if vocab_size <= 4 * _CHUNK:
        highest, token_ids = logits.max(dim=-1)
        return token_ids.where(highest.isfinite(), -1)
    chunks = logits[:, : vocab_size // _CHUNK * _CHUNK].unflatten(1, (-1, _CHUNK))
    rest = logits[:, -_CHUNK:]  # in its overlap with the chunk before, that chunk wins
    highest = torch.cat([chunks.amax(-1), rest.amax(-1, keepdim=True)], dim=1)
    start = highest.max(-1, keepdim=True).indices.mul_(_CHUNK).clamp_(max=vocab_size - _CHUNK)
    chosen = logits.gather(1, start + torch.arange(_CHUNK, device=logits.device)).max(dim=-1)
    return (start[:, 0] + chosen.indices).where(chosen.values.isfinite(), -1)


class Sampled(NamedTuple):
    """The sampled tokens of a step; tensors may not have been computed yet.

    token_ids: int64 [num_rows], -1 if no token can be sampled: see
    `nanoserve.sampling.diagnostics`. logprob_rows: the rows that `logprobs` has entries for, int64
    [num_entries]. states: by row, the slot states that must be updated with the row's token.
    errors: by row, why it has no token, such as an error of the request's own processors. The token
    of such a row is invalid.
    """

    token_ids: torch.Tensor
    logprobs: "LogprobTensors | None"
    logprob_rows: np.ndarray
    states: "list[tuple[int, SlotState]]"
    errors: dict[int, Exception]


class Sampler:
    """A sampler with a table of settings by slot; a step sends only the settings of new sequences.

    A greedy row costs an argmax. All others are copied once, in float32, and processed together.
    Samplers of other devices override how a row is sampled from its logits (`_choose`), and declare
    what that supports:

    direct: the last program that samples from unmodified logits, without a copy. masks_directly:
    True if `_choose` applies token masks to such rows. Otherwise they are sampled
        without a mask, and sampled again if the token is not allowed.
    """

    direct = Program.GREEDY
    masks_directly = False

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        processors: "Sequence[BatchProcessor]" = (),
        *,
        logprobs_mode: str = "raw_logprobs",
    ) -> None:
        self._logprobs_mode = logprobs_mode
        self._settings = np.zeros(num_slots, SETTINGS)
        self._states: list[SlotState | None] = [None] * num_slots
        self._vocab_size = vocab_size
        self.stages = make_stages(processors)
        names = [stage.name for stage in self.stages]
        first_draw = names.index("temperature")
        self._changes, self._draws = self.stages[:first_draw], self.stages[first_draw:]
        self._mask_bit = np.uint64(self.stages[names.index("token_mask")].bit)

    def set_slot(self, update: SlotUpdate) -> None:
        """Store the settings of the sequence that is new in a slot."""
        changes = [stage for stage in self._changes if stage.wants(update)]
        wanted = changes + [stage for stage in self._draws if stage.wants(update)]
        stages = sum(stage.bit for stage in wanted)
        self._settings[update.slot] = settings_of(
            update, stages, bool(changes), self._logprobs_mode.startswith("processed")
        )
        state = None
        if changes:
            from nanoserve.sampling.slot_state import SlotState

            state = SlotState(update, [stage.name for stage in changes if stage.is_registered])
        self._states[update.slot] = state

    def sample(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        tensors: Any = None,
        draft_tokens: Mapping[int, list[int]] = _NONE,
        token_masks: Mapping[int, TokenMask] = _NONE,
    ) -> Sampled:
        """Sample a token for each row.

        logits: [num_rows, vocab_size], in the model's dtype; not modified. slots and positions:
        [num_rows], the row's slot and the position that its new token will have. tensors: the batch
        on the device, for a sampler that reads slots and positions there. draft_tokens: by slot;
        such a slot has a row for its last token and one for each draft token. token_masks: by slot,
        the tokens that its rows may take.
        """
        rows = Rows(self._settings[slots], slots, positions, tensors, {})
        if token_masks:
            rows = self._with_masks(rows, token_masks)
        states: list[tuple[int, SlotState]] = []
        processed: torch.Tensor | None = None
        if (last := last_of(rows.settings["program"])) <= self.direct:
            token_ids = self._choose(logits, rows, last)
        else:
            token_ids, states, processed = self._choose_in_parts(logits, rows, draft_tokens)
        if token_masks and not self.masks_directly:
            token_ids = self._replace_illegal(token_ids, logits, rows)
        logprobs, logprob_rows = None, np.flatnonzero(rows.settings["num_logprobs"] >= 0)
        if len(logprob_rows):
            from nanoserve.sampling.logprobs import logprobs_of_rows

            given = logits, processed, token_ids, rows.settings, logprob_rows
            logprobs = logprobs_of_rows(*given, self._logprobs_mode)
        return Sampled(token_ids, logprobs, logprob_rows, states, rows.errors)

    def _choose_in_parts(
        self, logits: torch.Tensor, rows: Rows, draft_tokens: Mapping[int, list[int]]
    ) -> "tuple[torch.Tensor, list[tuple[int, SlotState]], torch.Tensor | None]":
        """Sample rows with unmodified logits first, then copies of the logits of all other rows."""
        token_ids = torch.empty(len(rows.slots), dtype=torch.int64, device=logits.device)
        is_direct = rows.settings["program"] <= int(self.direct)
        direct, others = np.flatnonzero(is_direct), np.flatnonzero(~is_direct)
        direct_index, index = to_device(logits.device, direct, others)
        if len(direct):
            part = rows.take(direct)
            chosen = self._choose(logits[direct_index], part, last_of(part.settings["program"]))
            token_ids[direct_index] = chosen
        part = rows.take(others)
        own = logits[index].float()
        part = part._replace(states=self._states_of(part.slots, draft_tokens))
        apply_stages(self._changes, own, part)
        part = part._replace(masks=())
        processed = None
        if self._logprobs_mode.startswith("processed"):
            from nanoserve.sampling.logprobs import processed_logits

            processed = processed_logits(own, part, self._filter)
        token_ids[index] = self._choose(own, part, last_of(part.settings["draw"]))
        by_row = [(row, self._states[rows.slots[row]]) for row in others.tolist()]
        states = [(row, state) for row, state in by_row if state is not None]
        return token_ids, states, processed

    def _with_masks(self, rows: Rows, token_masks: Mapping[int, TokenMask]) -> Rows:
        from nanoserve.sampling.token_masks import masks_of_rows

        masks = masks_of_rows(rows.slots, token_masks)
        settings = rows.settings  # a copy, not a view of the table
        is_masked = np.array([mask is not None for mask in masks])
        # Forbidden tokens must not count among the most likely tokens of a filter.
        by_stage = is_masked & (settings["program"] >= int(Program.FILTERED))
        settings["program"][by_stage] = Program.GENERAL
        settings["stages"][by_stage] |= self._mask_bit
        return rows._replace(masks=masks)

    def _states_of(
        self, slots: np.ndarray, draft_tokens: Mapping[int, list[int]]
    ) -> "list[SlotState | None]":
        """Return the state of each row: its slot's, extended by the draft tokens before the row."""
        num_seen = dict.fromkeys(draft_tokens, 0)
        states = []
        for slot in slots.tolist():
            state = self._states[slot]
            if state is not None and slot in num_seen:
                state = state.after(draft_tokens[slot][: num_seen[slot]])
                num_seen[slot] += 1
            states.append(state)
        return states

    def _replace_illegal(
        self, token_ids: torch.Tensor, logits: torch.Tensor, rows: Rows
    ) -> torch.Tensor:
        """Replace those tokens of rows with unmodified logits that the rows' masks forbid."""
        from nanoserve.sampling.token_masks import bits_of, replace_illegal

        def choose_within(some: np.ndarray, words: np.ndarray) -> list[int]:
            own = logits[tensor_of(some, logits)].float()
            own.masked_fill_(~bits_of(words, own), -torch.inf)
            part = rows.take(some)
            return self._choose(own, part, last_of(part.settings["draw"])).tolist()

        legal = token_ids.tolist()
        if replace_illegal(legal, rows, self._vocab_size, choose_within):
            return torch.tensor(legal, device=logits.device)
        return token_ids

    def _choose(self, logits: torch.Tensor, rows: Rows, last: int) -> torch.Tensor:
        """Sample by the remaining stages of the rows: temperature, filters, race and argmax.

        logits: [num_rows, vocab_size]. last: the last program among the rows' draws; if that is
        beyond `direct`, the logits are float32, and overwritten.
        """
        if last > Program.GREEDY:
            at_random = np.flatnonzero(rows.settings["draw"])  # not Program.GREEDY, which is 0
            with rows_of(logits, at_random) as part:
                apply_stages(self._draws, part, rows.take(at_random))
        return best_tokens(logits)

    def _filter(self, logits: torch.Tensor, rows: Rows) -> None:
        """Divide float32 logits by the temperature and filter them, in place, as `_choose` does."""
        apply_stages(self._draws[:-1], logits, rows)  # without the race
