"""What a user sees of an answer, to be compared with another's but for a float's last digits."""

from typing import NamedTuple

import numpy as np

from nanoserve import RequestOutput


class Seen(NamedTuple):
    """token_ids: of the completion. listed: the tokens whose log-probabilities it lists."""

    token_ids: list[int]
    listed: list[list[int]]
    logprobs: list[float]


def seen(output: RequestOutput) -> Seen:
    assert output.error is None
    completion = output.outputs[0]
    entries = [*(output.prompt_logprobs or ()), *(completion.logprobs or ())]
    entries = [entry or {} for entry in entries]  # the first token of a prompt has none
    values = [one.logprob for entry in entries for one in entry.values()]
    return Seen(completion.token_ids, [list(entry) for entry in entries], values)


def are_same(got: list[Seen], expected: list[Seen]) -> bool:
    if [one[:2] for one in got] != [one[:2] for one in expected]:
        return False
    pairs = zip(got, expected, strict=True)
    return all(np.allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-3) for a, b in pairs)
