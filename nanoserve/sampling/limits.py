"""Rows that may take only some tokens: those that a grammar allows now.

To list what is allowed takes longer than to ask whether one token is, and a copy of a row's logits
longer still. So on a CPU a row is sampled first, as if nothing was forbidden. What wins against all
tokens wins against some of them: if it is allowed, it is what would have come out of the allowed
ones alone, and only otherwise these are looked up, and the row is sampled again. On a GPU the masks
are filled while the model runs, and the sampling kernel reads them.

That is for rows whose logits are taken as they are. Whatever else changes or filters them comes
first, and then the mask, before the row is filtered: see `nanoserve.sampling.masks`.
"""

from typing import Any

import numpy as np
import torch

from nanoserve.engine.executor import TokenMask
from nanoserve.sampling.masks import bits_of, error_of_none, fill_masks
from nanoserve.sampling.rows import tensor_of


def sample_within(
    sampler: Any,
    logits: torch.Tensor,
    slots: np.ndarray,
    positions: np.ndarray,
    tensors: Any,
    limits: dict[int, TokenMask],
) -> Any:
    """`Sampler.sample`, with the rows of `limits`, by slot, kept within these."""
    sampled = sampler.sample_freely(logits, slots, positions, tensors)
    token_ids, errors = sampled.token_ids.tolist(), dict(sampled.errors)
    rows_of: dict[int, list[int]] = {}
    for row, slot in enumerate(slots.tolist()):
        if slot in limits:
            rows_of.setdefault(slot, []).append(row)
    waiting, changed = list(rows_of), set()
    while waiting:
        illegal: dict[int, int] = {}  # by slot, the index of its first row whose token is none
        for slot in waiting:
            try:
                index = limits[slot].first_illegal([token_ids[row] for row in rows_of[slot]])
            except ValueError as error:
                errors[rows_of[slot][0]] = error
            else:
                if index is not None and rows_of[slot][index] in changed:
                    told = "structured_outputs: its grammar refuses a token that it has allowed"
                    errors[rows_of[slot][index]] = ValueError(told)
                elif index is not None:
                    illegal[slot] = index
        masks, failed = fill_masks(
            ((limits[slot], index) for slot, index in illegal.items()), sampler._vocab_size
        )
        for number, error in failed.items():
            errors[rows_of[list(illegal)[number]][0]] = error
        rows = np.array([rows_of[slot][index] for slot, index in illegal.items()], dtype=np.int64)
        if len(rows):
            own = logits[tensor_of(rows, logits)].float()
            own.masked_fill_(~bits_of(masks, own), -torch.inf)
            settings = sampler._settings[slots[rows]]
            chosen = sampler._choose(own, settings, slots[rows], positions[rows]).tolist()
            changed.update(rows.tolist())
            for row, token_id in zip(rows.tolist(), chosen, strict=True):
                token_ids[row] = token_id
                if token_id < 0:
                    errors.setdefault(row, error_of_none())
        # Behind a token that was taken instead there may be further rows, if it was guessed.
        waiting = [slot for slot in illegal if not errors.keys() & {*rows_of[slot]}]
    if not changed:
        return sampled._replace(errors=errors)
    new_ids = torch.tensor(token_ids, device=logits.device)
    logprobs, _ = sampler._logprobs(logits, new_ids, sampler._settings[slots])
    return sampled._replace(token_ids=new_ids, logprobs=logprobs, errors=errors)
