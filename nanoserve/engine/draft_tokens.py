"""Which draft tokens of a step are accepted.

A row with k draft tokens is computed at k + 1 positions, and a token is sampled at each of them:
one *output* each. The sampler is the verifier: its noise is a function of the position, so the
first output is what would have been sampled without drafts, and so is each one whose draft tokens
before it were all sampled.
"""

from collections.abc import Mapping, Sequence

from nanoserve.engine.executor import StepResult
from nanoserve.outputs import TokenLogprobs


def accept_draft_tokens(
    sampled: list[list[int]], output_slots: Sequence[int], draft_tokens: Mapping[int, list[int]]
) -> tuple[list[list[int]], list[int]]:
    """Return, by row, the tokens that count and the index of the row's first output.

    sampled: by output, the token that was sampled there, or none ([]) if none could be. A row takes
    tokens up to the first one that differs from its draft token. An output without a token ends
    what its row gets; if that is nothing, its request fails. Otherwise the next step comes to the
    same point again, without a draft token before it.
    output_slots: by output, the slot of its sequence.
    """
    token_ids: list[list[int]] = []
    first_outputs: list[int] = []
    output = 0
    while output < len(sampled):
        drafts, accepted = draft_tokens.get(output_slots[output], ()), []
        for index, new_ids in enumerate(sampled[output : output + len(drafts) + 1]):
            accepted += new_ids
            if index == len(drafts) or new_ids != [drafts[index]]:
                break
        token_ids.append(accepted)
        first_outputs.append(output)
        output += len(drafts) + 1
    return token_ids, first_outputs
