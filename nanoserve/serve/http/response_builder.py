"""Convert engine outputs to responses, for all endpoints."""

import base64
import json
import time
from io import BytesIO
from typing import Any
from uuid import uuid4

import numpy as np

from nanoserve.engine.request import Request
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.serve.engine_thread import EngineDeadError
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import GenerationBody
from nanoserve.text.token_bytes import TextPositions
from nanoserve.text.tokenizer import Tokenizer


class Answer:
    """The base of the responses of all generating endpoints.

    A request with several prompts or completions has one choice for each completion. Outputs arrive
    in any order, so a choice is identified by its index.
    """

    heartbeat = b": heartbeat\n\n"  # a comment
    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self, body: GenerationBody, model: str, requests: list[Request], tokenizer: Tokenizer
    ) -> None:
        self.requests = requests
        self._body, self._tokenizer = body, tokenizer
        n = body.n or 1
        self._first_index = {r.request_id: number * n for number, r in enumerate(requests)}
        self._num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._num_output_tokens = 0
        self._num_cached_tokens: dict[str, int | None] = {}
        self._positions: dict[int, TextPositions] = {}  # by choice, if it has logprobs
        own_id = uuid4().hex if body.request_id is None else body.request_id
        self._common = {"id": f"{self.id_prefix}-{own_id}", "created": int(time.time())}
        self._common["model"] = model
        # Equal in every event, so it is encoded once.
        common = json.dumps({**self._common, "object": self.chunk_object})[:-1]
        self._head = f'data: {common}, "choices": ['
        self._tail = '], "usage": null}\n\n' if body.include_usage else "]}\n\n"

    def events(self, outputs: list[RequestOutput]) -> bytes:
        """Return new outputs as server-sent events."""
        events = []
        for output in outputs:
            first_index = self._first_index[output.request_id]
            self._count(output)
            for completion in output.outputs:
                index = first_index + completion.index
                events += self._choice_events(index, completion, output)
            if output.error is not None or is_aborted(output):
                events.append(error_of(output).event().decode())
        return "".join(events).encode()

    def first_events(self) -> bytes:
        """Return no events, since those of a choice begin with its first output."""
        return b""

    def error_event(self, error: ApiError) -> bytes:
        return error.event()

    def last_events(self) -> bytes:
        """Return the events after all choices: usage, if requested, and [DONE].

        If the engine fails, `EventStream` sends an error instead.
        """
        usage = ""
        if self._body.include_usage:
            usage = f'{self._head}], "usage": {json.dumps(self.usage())}}}\n\n'
        return f"{usage}data: [DONE]\n\n".encode()

    def whole(self, outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        """Return the complete response, unstreamed. Raises `ApiError` if a part has failed."""
        choices = []
        for request in self.requests:
            output = outputs[request.request_id]
            if output.error is not None or is_aborted(output):
                raise error_of(output)
            self._count(output)
            first_index = self._first_index[output.request_id]
            for completion in output.outputs:
                choice = self._choice(first_index + completion.index, completion, output)
                choices.append(choice | _routed_experts(completion))
        answer = {**self._common, "object": self.whole_object, "choices": choices}
        return answer | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        prompt, output = self._num_prompt_tokens, self._num_output_tokens
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output}
        usage["total_tokens"] = prompt + output
        numbers = self._num_cached_tokens.values()
        cached = [number for number in numbers if number is not None]
        if cached and len(cached) == len(numbers):  # None: enable_prompt_tokens_details is off
            usage["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        return usage

    def _count(self, output: RequestOutput) -> None:
        self._num_output_tokens += sum(len(one.token_ids) for one in output.outputs)
        self._num_cached_tokens[output.request_id] = output.metrics.num_cached_prompt_tokens

    def _event(self, choice: str) -> str:
        """Return a server-sent event with one choice, which is passed as JSON."""
        if self._body.usage_in_every_chunk:
            return f'{self._head}{choice}], "usage": {json.dumps(self.usage())}}}\n\n'
        return f"{self._head}{choice}{self._tail}"

    def _positions_of(self, index: int, start: int = 0) -> TextPositions:
        """Return the token positions of a choice in its text, which begins at `start`."""
        if index not in self._positions:
            skips = self.requests[0].params.skip_special_tokens
            known = self._tokenizer.token_bytes
            self._positions[index] = TextPositions(known, skips, start)
        return self._positions[index]

    def _choice_events(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> list[str]:
        raise NotImplementedError

    def _choice(
        self, index: int, completion: CompletionOutput, output: RequestOutput
    ) -> dict[str, Any]:
        raise NotImplementedError


def as_json(value: Any) -> str:
    """Encode as JSON, with a fast path for None, the most frequent value in events."""
    return "null" if value is None else json.dumps(value)


def members(more: dict[str, Any]) -> str:
    """Return `more` as additional members of a JSON object that is not empty."""
    return f", {json.dumps(more)[1:-1]}" if more else ""


def _routed_experts(completion: CompletionOutput) -> dict[str, Any]:
    """Return vLLM's `routed_experts` in JSON: the bytes of a .npy file, in base64."""
    if completion.routed_experts is None:
        return {}
    file = BytesIO()
    np.save(file, completion.routed_experts, allow_pickle=False)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode()}


def is_aborted(output: RequestOutput) -> bool:
    """Return True if a completion of the request was aborted."""
    return any(completion.finish_reason == "abort" for completion in output.outputs)


def error_of(output: RequestOutput) -> ApiError:
    """Return the error response for a failed request, a fault of the client or the server."""
    if isinstance(output.error, (ValueError, EngineDeadError)):
        return ApiError.of(output.error)
    if output.error is None:
        return ApiError(503, "the server has ended this request", code="aborted")
    message = "the model could not compute this request; see the server's log for details"
    return ApiError(500, message)
