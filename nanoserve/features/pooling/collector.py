"""Joins the chunks of a prompt to the result of a pooling request."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np

from nanoserve.engine.plan import Row
from nanoserve.engine.request import Request
from nanoserve.features.pooling.pooler import finished_result

# (what the head has passed on of each chunk, number of tokens) -> the pooled rows of the prompt
Join = Callable[[list[np.ndarray], int], np.ndarray]

JOIN_OF: dict[str, Join] = {
    "LAST": lambda chunks, num_tokens: chunks[-1][0],
    "CLS": lambda chunks, num_tokens: chunks[0],
    "MEAN": lambda chunks, num_tokens: np.sum(chunks, axis=0) / num_tokens,
    "ALL": lambda chunks, num_tokens: np.concatenate(chunks),
}


class PoolingCollector:
    """The collector of one head of `nanoserve.features.pooling.heads`.

    Chunks arrive in order. One that begins at 0 may be computed again, after a preemption or a step
    that was rolled back; what was kept of the chunks before is dropped then.
    """

    def __init__(self, join: Join, activation: str) -> None:
        self._join, self._activation = join, activation
        self._chunks: WeakKeyDictionary[Request, list[np.ndarray]] = WeakKeyDictionary()

    def __call__(
        self, request: Request, row: Row, values: dict[int, np.ndarray], first: int
    ) -> Exception | None:
        """Keep a chunk; with the last one the request has its result, and ends.

        values: what the head has passed on of each chunk, by its first output.
        """
        if row.start == 0:
            self._chunks.pop(request, None)
        self._chunks.setdefault(request, []).append(values[first])
        num_tokens = row.start + row.n
        if num_tokens < row.seq.num_prompt_tokens:
            return None
        pooled = self._join(self._chunks.pop(request), num_tokens)
        result = finished_result(request.pooling_params, pooled, self._activation)
        if not np.isfinite(result).all():
            return FloatingPointError("the model computed hidden states that are NaN or infinite")
        request.set_pooled(result)
        return None
