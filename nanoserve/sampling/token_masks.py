"""Token masks restrict rows to the tokens that their grammars allow at this point.

A token mask comes with the sampling of a step, and is applied in one of two places.

If other stages change a row's logits, or filters follow, the mask is a stage after these changes
(`apply_token_masks`).

A row with unmodified logits is not copied for a mask. Computing all allowed tokens takes longer
than checking one token. So on a CPU the row is first sampled without the mask. The winner of all
tokens also wins among any subset that contains it: if it is allowed, it is the token that sampling
among the allowed ones would give. Only otherwise is the mask computed, and the row sampled again
(`replace_illegal`). On a GPU the masks are filled while the model runs, and the sampling kernel
reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nanoserve.engine.executor import TokenMask
from nanoserve.sampling.host_copies import to_device
from nanoserve.sampling.rows import Rows
from nanoserve.sampling.settings import Program

RowMask = tuple[TokenMask, int]  # a mask, and the index that a row has in it


def masks_of_rows(slots: np.ndarray, token_masks: Mapping[int, TokenMask]) -> list[RowMask | None]:
    """Return the mask of each row, given the slots' masks; the rows of a slot are in order."""
    num_seen = dict.fromkeys(token_masks, 0)
    masks: list[RowMask | None] = []
    for slot in slots.tolist():
        if slot in token_masks:
            masks.append((token_masks[slot], num_seen[slot]))
            num_seen[slot] += 1
        else:
            masks.append(None)
    return masks


def fill_masks(
    masks: Sequence[RowMask], vocab_size: int
) -> tuple[np.ndarray, dict[int, ValueError]]:
    """Return the bits of masks, int32 [num_masks, ceil(vocab_size / 32)], and errors.

    errors: by index of the mask, why it cannot be computed; such a mask allows all tokens.
    """
    words = np.full((len(masks), -(-vocab_size // 32)), -1, dtype=np.int32)
    errors: dict[int, ValueError] = {}
    for number, (mask, index) in enumerate(masks):
        try:
            mask.fill(index, words[number])
        except ValueError as error:
            errors[number] = error
    return words, errors


def bits_of(words: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens that each mask allows, bool [num_rows, vocab_size], on their device."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    (allowed,) = to_device(logits.device, bits.view(bool))
    return allowed


def are_empty(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return bool [num_masks]: True if a mask allows none of the model's tokens."""
    # The last word may have bits of tokens that the model does not have.
    known = np.full(words.shape[1], -1, dtype=np.int32)
    if vocab_size % 32:
        known[-1] = (1 << vocab_size % 32) - 1
    return np.logical_not((words & known).any(axis=1))


def apply_token_masks(logits: torch.Tensor, rows: Rows) -> None:
    """Set to -inf, in place, the logits of tokens that the rows' masks forbid; a stage.

    Logits that are not finite stay: they are an error even for forbidden tokens.
    """
    masked = [row for row, mask in enumerate(rows.masks) if mask is not None]
    if not masked:
        return
    masks = [mask for mask in rows.masks if mask is not None]
    words, failed = fill_masks(masks, logits.shape[1])
    for number, error in failed.items():
        rows.fail(masked[number], error)
    for number in np.flatnonzero(are_empty(words, logits.shape[1])).tolist():
        if rows.states[masked[number]] is None:  # otherwise its parameters explain the error
            rows.fail(masked[number], error_of_none())
    index = np.array(masked, dtype=np.int64)
    with rows.among(index).part(logits) as part:
        part.masked_fill_(~bits_of(words, part) & part.isfinite(), -torch.inf)


def replace_illegal(
    token_ids: list[int],
    rows: Rows,
    vocab_size: int,
    choose_within: Callable[[np.ndarray, np.ndarray], list[int]],
) -> bool:
    """Replace each token that its row's mask forbids by an allowed one.

    Rows with the program GENERAL had their masks as a stage, and are not changed. choose_within:
    samples some of the rows again, given the bits of their masks. Returns True if any token was
    replaced.
    """
    rows_of_slot: dict[int, list[int]] = {}
    for row in np.flatnonzero(rows.settings["program"] < int(Program.GENERAL)).tolist():
        if rows.masks[row] is not None:
            rows_of_slot.setdefault(int(rows.slots[row]), []).append(row)
    replaced: set[int] = set()
    waiting = list(rows_of_slot)
    while waiting:
        illegal: dict[int, int] = {}  # by slot, its first row whose token is not allowed
        for slot in waiting:
            first = _first_illegal(token_ids, rows, rows_of_slot[slot], replaced)
            if first is not None:
                illegal[slot] = first
        again = np.array(list(illegal.values()), dtype=np.int64)
        if not len(again):
            break
        words, failed = fill_masks([rows.masks[row] for row in again], vocab_size)
        for row, token_id in zip(again.tolist(), choose_within(again, words), strict=True):
            token_ids[row] = token_id
            replaced.add(row)
        # The rows after a replaced token may count now: check them, too.
        waiting = []
        for number, (slot, row) in enumerate(illegal.items()):
            if number in failed:
                rows.fail(rows_of_slot[slot][0], failed[number])
            elif token_ids[row] < 0:
                rows.fail(row, error_of_none())
            else:
                waiting.append(slot)
    return bool(replaced)


def _first_illegal(
    token_ids: list[int], rows: Rows, of_slot: list[int], replaced: set[int]
) -> int | None:
    """Return the first row of a slot whose token is not allowed, unless its request fails."""
    masks: Any = rows.masks
    mask, _ = masks[of_slot[0]]
    try:
        index = mask.first_illegal([token_ids[row] for row in of_slot])
    except ValueError as error:
        rows.fail(of_slot[0], error)
        return None
    if index is None:
        return None
    if of_slot[index] in replaced:
        message = "structured_outputs: the grammar rejects a token that its mask allows"
        rows.fail(of_slot[index], ValueError(message))
        return None
    return of_slot[index]


def error_of_none() -> ValueError:
    """Return the error of a row whose grammar allows none of the model's tokens."""
    return ValueError(
        "no token can be chosen after structured_outputs: the grammar is complete, or needs text "
        "that this tokenizer cannot produce, and EOS is not allowed (is ignore_eos set?)"
    )
