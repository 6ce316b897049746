"""Adds the log-probabilities of tokens, and the tokens' strings, to the request's output."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nanoserve.engine.executor import StepResult
from nanoserve.engine.plan import Row
from nanoserve.engine.request import Request
from nanoserve.outputs import Logprob, TokenLogprobs


def collect_logprobs(
    requests: dict[str, Request],
    rows: list[Row],
    joined: list[int],
    result: StepResult,
    text_of_token: Callable[[int], str],
) -> dict[Request, Exception]:
    """Append the log-probabilities of a step to the completions that requested them.

    joined: by row, how many of its tokens were appended. Returns the requests whose tokens could
    not be decoded, with their exceptions.
    """
    failed: dict[Request, Exception] = {}
    for entry, (row, index) in enumerate(result.logprob_places):
        seq = rows[row].seq
        request = requests.get(seq.request_id)
        if request is None or joined[row] < 0 or request in failed:
            continue
        completion = request.completions[seq.index]
        if completion.logprobs is None:
            completion.logprobs, completion.cumulative_logprob = [], 0.0
        if index < joined[row]:  # a stop token is not part of the output
            listed, k = seq.params.logprob_token_ids, seq.params.logprobs
            try:
                candidates = _candidates(result.logprobs, entry, k, text_of_token, listed)
            except Exception as error:  # concerns this text only: other requests continue
                failed[request] = error
                continue
            token_id = seq.token_ids[len(seq.token_ids) - joined[row] + index]
            completion.logprobs.append(candidates)
            total = completion.cumulative_logprob or 0.0
            completion.cumulative_logprob = total + candidates[token_id].logprob
    return failed


class PromptLogprobsCollector:
    """Collects the results of the head `nanoserve.sampling.prompt_logprobs`, chunk by chunk."""

    def __init__(self, text_of_token: Callable[[int], str]) -> None:
        self._text_of_token = text_of_token

    def __call__(
        self, request: Request, row: Row, values: TokenLogprobs, first: int
    ) -> Exception | None:
        collected, k = request.prompt_logprobs, request.params.prompt_logprobs
        if row.start == 0:  # the first chunk, perhaps computed again after a preemption
            del collected[1:]
        for index in range(first, first + row.num_outputs - row.num_sampled):
            if math.isnan(values.logprobs[index, 0]):
                return FloatingPointError(
                    f"token {len(collected)} of the prompt has no log-probability: "
                    f"the logits that the model computed before it are not finite"
                )
            collected.append(_candidates(values, index, k, self._text_of_token))
        return None


def _candidates(
    values: TokenLogprobs,
    row: int,
    k: int,
    text_of_token: Callable[[int], str],
    listed: list[int] | None = None,
) -> dict[int, Logprob]:
    """Return the row's token and the k most likely tokens, or only the `listed` ones among them."""
    columns: Any = slice(k + 1)
    if listed is not None:
        found = np.flatnonzero(np.isin(values.token_ids[row, 1 : k + 1], listed)) + 1
        columns = np.concatenate([[0], found])
    token_ids = values.token_ids[row, columns].tolist()
    logprobs = values.logprobs[row, columns].tolist()
    ranks = [int(values.ranks[row]), *range(1, len(token_ids))]
    if listed is not None:  # columns are sorted by rank
        ranks[1:] = columns[1:].tolist()
    candidates: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(token_ids, logprobs, ranks, strict=True):
        candidates.setdefault(token_id, Logprob(logprob, rank, text_of_token(token_id)))
    return candidates
