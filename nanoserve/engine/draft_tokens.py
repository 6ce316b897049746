"""Verifies the draft tokens of a step.

A row with k draft tokens is computed at k + 1 positions, and a token is sampled at each of them:
one *output* each. The sampler itself verifies: its noise is a function of the position, so the
first output is the token that would have been sampled without drafts, and so is each later output
if all draft tokens before it were sampled.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from nanoserve.engine.plan import Plan


class TokenState(Protocol):
    """A token state is what a slot keeps of its tokens, such as how often each one occurred."""

    def extend(self, token_ids: list[int]) -> None: ...


class AcceptedRows(NamedTuple):
    """The accepted tokens of a step, by row.

    token_ids: the new tokens of each row. first_outputs: the index of its first output.
    last_outputs: the output at which its last token was sampled; the first output if it has no
    token.
    """

    token_ids: list[list[int]]
    first_outputs: Sequence[int]
    last_outputs: list[int]

    def errors(self, errors: Mapping[int, Exception]) -> dict[int, Exception]:
        """Convert errors by output to errors by row, for the rows without a token."""
        firsts = enumerate(self.first_outputs)
        return {row: errors[first] for row, first in firsts if first in errors}

    def extend_states(self, states: Mapping[int, TokenState]) -> None:
        """Append each row's tokens to the state, by output, of its first output if there is one."""
        if states:
            for first, token_ids in zip(self.first_outputs, self.token_ids, strict=True):
                if first in states:
                    states[first].extend(token_ids)

    def places(self, outputs: Sequence[int]) -> list[tuple[int, int] | None]:
        """Return the places of the tokens of these outputs: (row, index among its tokens).

        An output without a token, or after a rejected draft token, has None.
        """
        accepted = {
            first + index: (row, index)
            for row, (first, ids) in enumerate(zip(self.first_outputs, self.token_ids, strict=True))
            for index in range(len(ids))
        }
        return [accepted.get(output) for output in outputs]


def accept_draft_tokens(
    sampled: list[list[int]],
    output_slots: Sequence[int] | np.ndarray,
    draft_tokens: Mapping[int, list[int]],
) -> AcceptedRows:
    """Return the accepted tokens of each row, given the tokens sampled at all outputs.

    sampled: by output, the sampled token, or [] if none could be sampled. A row takes tokens up to
        the first one that differs from its draft token. An output without a token ends the row's
        tokens; if the row then has none, its request fails. Otherwise the next step samples at this
        position again, without a draft token before it.
    output_slots: by output, the slot of its sequence. draft_tokens: by slot.
    """
    if not draft_tokens:
        outputs = range(len(sampled))
        return AcceptedRows(sampled, outputs, list(outputs))
    token_ids: list[list[int]] = []
    first_outputs: list[int] = []
    last_outputs: list[int] = []
    output = 0
    while output < len(sampled):
        drafts = draft_tokens.get(output_slots[output], [])
        accepted: list[int] = []
        for index, new_ids in enumerate(sampled[output : output + len(drafts) + 1]):
            accepted += new_ids
            if index == len(drafts) or new_ids != [drafts[index]]:
                break
        token_ids.append(accepted)
        first_outputs.append(output)
        last_outputs.append(output + max(len(accepted) - 1, 0))
        output += len(drafts) + 1
    return AcceptedRows(token_ids, first_outputs, last_outputs)


def accepted_of_drafts(plan: Plan, token_ids: list[list[int]]) -> list[tuple[int, int]]:
    """Return, for each row with draft tokens, the number accepted and the number proposed.

    token_ids: the new tokens of each row of `plan.sampled`.
    """
    rows = zip(plan.sampled, token_ids, strict=True)
    return [(max(0, len(i) - 1), row.num_sampled - 1) for row, i in rows if row.num_sampled > 1]
