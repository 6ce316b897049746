"""Responses of the endpoints that pool: the results of all texts of a request, in their order."""

import base64
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from nanoserve.engine.request import Request
from nanoserve.features.pooling.results import pooled_of
from nanoserve.outputs import RequestOutput, ScoringRequestOutput
from nanoserve.serve.http.response_builder import error_of, is_aborted

# The entries of a response, from the outputs in the order of the requests.
Entries = Callable[[list[RequestOutput]], dict[str, Any]]


class PoolingAnswer:
    """An `AnswerWriter` of a response that is never streamed.

    kind: the beginning of its id, such as "embd". has_list: True for OpenAI's `"object": "list"`.
    """

    def __init__(
        self,
        requests: list[Request],
        entries: Entries,
        kind: str,
        request_id: str,
        model: str,
        has_list: bool = True,
    ) -> None:
        self.requests, self._entries = requests, entries
        self._head: dict[str, Any] = {"id": f"{kind}-{request_id}"}
        if has_list:
            self._head |= {"object": "list", "created": int(time.time())}
        self._head["model"] = model

    def whole(self, outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        """Return the complete response. Raises `ApiError` if a request has failed."""
        in_order = [outputs[request.request_id] for request in self.requests]
        for output in in_order:
            if output.error is not None or is_aborted(output):
                raise error_of(output)
        return self._head | self._entries(in_order) | {"usage": usage_of(in_order)}


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Return the numbers of tokens; nothing is generated."""
    outputs = list(outputs)
    count = sum(len(output.prompt_token_ids) for output in outputs)
    usage: dict[str, Any] = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    cached = [output.num_cached_tokens for output in outputs]
    if None not in cached:
        usage["prompt_tokens_details"] = {"cached_tokens": sum(map(int, cached))}
    return usage


def numbers(output: RequestOutput, encoding_format: str | None) -> Any:
    """Return the result of a request as lists of numbers, or as base64 of float32."""
    pooled = pooled_of(output)
    if encoding_format == "base64":
        return base64.b64encode(pooled.astype("<f4").tobytes()).decode()
    return pooled.tolist()


def embeddings(outputs: list[RequestOutput], encoding_format: str | None) -> dict[str, Any]:
    return _data("embedding", "embedding", (numbers(one, encoding_format) for one in outputs))


def pooled_data(outputs: list[RequestOutput], encoding_format: str | None) -> dict[str, Any]:
    return _data("pooling", "data", (numbers(one, encoding_format) for one in outputs))


def classes(outputs: list[RequestOutput], labels: Sequence[str]) -> dict[str, Any]:
    """Return the probabilities of each text, and the name of the most likely class."""
    data = []
    for index, output in enumerate(outputs):
        probs = pooled_of(output)
        best = labels[int(np.argmax(probs))]
        entry = {"index": index, "label": best, "probs": probs.tolist()}
        data.append(entry | {"num_classes": len(probs)})
    return {"data": data}


def scores(outputs: list[ScoringRequestOutput]) -> dict[str, Any]:
    return _data("score", "score", (one.outputs.score for one in outputs))


def ranks(
    outputs: list[ScoringRequestOutput],
    texts: list[str],
    top_n: int | None,
    shows_documents: bool,
) -> dict[str, Any]:
    """Return the documents, the best one first; among equals, the one that came first."""
    found = [one.outputs.score for one in outputs]
    best = sorted(range(len(found)), key=lambda index: (-found[index], index))
    results: list[dict[str, Any]] = []
    for index in best[:top_n]:
        results.append({"index": index, "relevance_score": found[index]})
        if shows_documents:
            results[-1]["document"] = {"text": texts[index]}
    return {"results": results}


def _data(kind: str, field: str, values: Iterable[Any]) -> dict[str, Any]:
    entries = enumerate(values)
    return {"data": [{"index": index, "object": kind, field: value} for index, value in entries]}
