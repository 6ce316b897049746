"""Answer lines with the server's own application, in this process and without HTTP."""

import hashlib
import json
from typing import Any, NamedTuple
from uuid import uuid4

from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.batch.asgi_client import post
from nanoserve.serve.batch.requests import BatchLine
from nanoserve.serve.engine_thread import EngineDeadError
from nanoserve.serve.http.app import ApiServer
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.utils.checks import shown

_GENERATE = ("/v1/chat/completions", "/v1/completions")
_POOL = ("/v1/embeddings", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")
_URLS = (*_GENERATE, *_POOL)


class Answered(NamedTuple):
    """The result of a line. `content` is the line to write, or b"" if the next run is to retry."""

    number: int
    content: bytes
    error: str  # error message; "" if there is none


class Answerer:
    """An engine that answers lines exactly as a server would.

    settings: fields of `ServerSettings`. options: options of `LLM`. Raises the errors of both.

    A request without a seed gets one that is derived from its `custom_id` and the engine's seed.
    Its answer therefore does not depend on concurrent requests, on the replica, or on restarts.
    """

    def __init__(
        self,
        model: str,
        options: dict[str, Any],
        settings: dict[str, Any],
        engine_process: bool = True,
    ) -> None:
        self.llm = AsyncLLM(model, engine_process, **options)
        try:
            self._app = ApiServer(self.llm, ServerSettings(**settings)).app
        except BaseException:
            self.llm.shutdown()
            raise
        self._seed = self.llm.engine.config.seed

    async def answer(self, line: BatchLine) -> Answered:
        """Answer a line. Raises `EngineDeadError` if the engine has ended."""
        try:
            status, body = await post(self._app, *self._request(line))
        except ApiError as error:
            status, body = error.status, bytes(error.response().body)
        if status == 200:
            return Answered(line.number, _written(line, status, body, "null"), "")
        failure = json.loads(body)["error"]
        message = f"custom_id={line.custom_id!r:.200}: {failure['message']}"
        if status >= 500:  # not the line's fault
            if failure["code"] == "engine_dead" or not self.llm.is_running:
                raise EngineDeadError from self.llm.owner.error
            return Answered(line.number, b"", message)
        named = {"code": failure["code"] or failure["type"], "message": failure["message"]}
        return Answered(line.number, _written(line, status, body, json.dumps(named)), message)

    def close(self) -> None:
        """Abort running requests, and release the engine."""
        self.llm.shutdown()

    def _request(self, line: BatchLine) -> tuple[str, bytes]:
        """Return the path and the body of the request in a line.

        Raises `ApiError` for an unsupported method, URL or body.
        """
        method, url = line.fields.get("method"), line.fields.get("url")
        body = line.fields.get("body")
        if method != "POST":
            raise ApiError(400, f"method={shown(method)} must be 'POST'", "method")
        if url not in _URLS:
            raise ApiError(400, f"url={shown(url)} must be one of {', '.join(_URLS)}", "url")
        if not isinstance(body, dict):
            raise ApiError(400, f"body={shown(body)} must be an object", "body")
        if body.get("stream"):
            raise ApiError(400, "stream=true is not supported in a batch", "stream")
        is_seeded = body.get("seed") not in (None, -1)
        if url in _GENERATE and not is_seeded and not _has_several_prompts(body):
            body = body | {"seed": self._seed_of(line.custom_id)}
        return url, json.dumps(body).encode()

    def _seed_of(self, custom_id: str) -> int:
        text = f"{self._seed} {custom_id}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def error_answer(line: BatchLine, message: str) -> Answered:
    """Return the answer to a line that no engine can answer."""
    error = ApiError(500, message, code="engine_ended")
    named = json.dumps({"code": "engine_ended", "message": message})
    content = _written(line, 500, bytes(error.response().body), named)
    return Answered(line.number, content, f"custom_id={line.custom_id!r:.200}: {message}")


def _has_several_prompts(body: dict[str, Any]) -> bool:
    """Return True for a list of prompts, in which equal prompts must not share a seed."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _written(line: BatchLine, status: int, body: bytes, error: str) -> bytes:
    """Return a line of the output. The server's body is JSON without line breaks, kept as it is."""
    head = f'{{"id": "{line.answer_id}", "custom_id": {json.dumps(line.custom_id)}, '
    response = f'"response": {{"status_code": {status}, "request_id": "{uuid4().hex}", "body": '
    return f"{head}{response}".encode() + body + f'}}, "error": {error}}}\n'.encode()
