"""HTTP responses, each a complete JSON body or a stream of server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from nanoserve.engine.request import Request
from nanoserve.outputs import RequestOutput
from nanoserve.serve.engine_thread import EngineDeadError
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.response_stream import OutputReader

_MOST_ENTRIES = 128  # tokens with log-probabilities that are encoded on the event loop itself
_NUMBERS_PER_ENTRY = 64  # of an embedding: as many take as long as a token
# Members of a response that may be long lists.
_LISTS = ("choices", "data", "results")
_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers events until it has 4 KiB of them
}


class WholeAnswer(Protocol):
    """Writes the outputs of requests in the format of an API, once they are complete."""

    requests: list[Request]

    def whole(self, outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        """Return the complete response. Raises `ApiError` if a part has failed."""


class AnswerWriter(WholeAnswer, Protocol):
    """Writes the outputs of requests complete or as events.

    heartbeat: bytes that clients skip, sent while there is nothing to send.
    """

    heartbeat: bytes

    def first_events(self) -> bytes:
        """Return the events before any output."""

    def events(self, outputs: list[RequestOutput]) -> bytes:
        """Return new outputs as server-sent events."""

    def last_events(self) -> bytes:
        """Return the events after the last output."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream whose engine has failed."""


async def whole_response(answer: WholeAnswer, reader: OutputReader, receive: Receive) -> Response:
    """Wait for the complete output and return it; abort if the client disconnects first."""
    outputs = {}
    async with _watched(reader, receive):
        while not reader.is_over:
            for output in await reader.read():
                outputs[output.request_id] = output
    if len(outputs) < len(answer.requests):  # the client has disconnected
        return Response(status_code=499)
    if not _is_large(outputs.values()):
        return JSONResponse(answer.whole(outputs))
    content = await asyncio.to_thread(lambda: _encoded(answer.whole(outputs)))
    return Response(content, media_type="application/json")


class EventStream(Response):
    """A stream of an output. Tokens that a slow client has not read yet are sent together.

    The last event of each choice has its finish reason; `last_events` follow. A client
    that disconnects is noticed at once, and the engine aborts its request between two steps. A
    client that stops reading blocks its own stream but not the engine; the operating system closes
    its connection after a timeout.
    """

    def __init__(
        self, answer: AnswerWriter, reader: OutputReader, heartbeat_interval: float
    ) -> None:
        super().__init__(headers=_EVENTS)
        del self.headers["content-length"]
        self._answer, self._reader = answer, reader
        self._interval = heartbeat_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        if first := self._answer.first_events():
            await send({"type": "http.response.body", "body": first, "more_body": True})
        async with _watched(self._reader, receive, self._interval):
            try:
                while not self._reader.is_over:
                    outputs = await self._reader.read()
                    body = self._answer.heartbeat
                    if _is_large(outputs):
                        body = await asyncio.to_thread(self._answer.events, outputs)
                    elif outputs:
                        body = self._answer.events(outputs)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                end = self._answer.last_events()  # ignored if the client has disconnected
            except EngineDeadError as error:
                end = self._answer.error_event(ApiError.of(error))
            await send({"type": "http.response.body", "body": end})


def _is_large(outputs: Iterable[RequestOutput]) -> bool:
    """Return True if encoding `outputs` would block the event loop for more than about 10 ms."""
    num_entries = 0
    for output in outputs:
        num_entries += len(output.prompt_logprobs or ())
        if output.pooled is not None:
            num_entries += output.pooled.size // _NUMBERS_PER_ENTRY
        for completion in output.outputs:
            num_entries += len(completion.logprobs or ()) + len(completion.token_ids) // 16
    return num_entries > _MOST_ENTRIES


def _encoded(whole: dict[str, Any]) -> bytes:
    """Encode a response as JSON, in the format of `JSONResponse`.

    The entries of its list are encoded one at a time, because the encoder holds the interpreter
    lock (GIL) for each call, and all entries together may be many megabytes.
    """
    encode = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    fields = []
    for name, value in whole.items():
        text = f"[{','.join(map(encode, value))}]" if name in _LISTS else encode(value)
        fields.append(f"{encode(name)}:{text}")
    return f"{{{','.join(fields)}}}".encode()


@asynccontextmanager
async def _watched(
    reader: OutputReader, receive: Receive, interval: float | None = None
) -> AsyncIterator[None]:
    """Close the reader when its client disconnects, and on exit.

    Wakes the reading task every `interval` seconds, so that it can send a heartbeat.
    """

    async def watch() -> None:
        while True:
            try:
                message = await asyncio.wait_for(receive(), interval)
            except asyncio.TimeoutError:
                reader.wake()
                continue
            if message["type"] == "http.disconnect":
                reader.close()
                reader.wake()
                return

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        reader.close()
