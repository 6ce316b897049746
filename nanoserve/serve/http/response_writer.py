"""How an answer travels: in one piece, or as server-sent events while it grows."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from nanoserve.outputs import RequestOutput
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.response_builder import Answer
from nanoserve.serve.response_stream import EngineDeadError, OutputReader

_HEARTBEAT = b": the model is at work\n\n"  # a comment, which every reader of events skips
_MOST_ENTRIES = 128  # tokens with log-probabilities, that are written in the event loop itself
_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would keep events until it has 4 KiB of them
}


async def whole_response(answer: Answer, reader: OutputReader, receive: Receive) -> Response:
    """Wait for all of an answer. If its client goes away first, it is aborted."""
    outputs = {}
    async with _watched(reader, receive):
        while not reader.is_over:
            for output in await reader.read():
                outputs[output.request_id] = output
    if len(outputs) < len(answer.requests):  # nobody is left to be told
        return Response(status_code=499)
    if not _is_large(outputs.values()):
        return JSONResponse(answer.whole(outputs))
    content = await asyncio.to_thread(lambda: _encoded(answer.whole(outputs)))
    return Response(content, media_type="application/json")


class EventStream(Response):
    """Send an answer while it grows; what its client has not taken yet comes in one piece.

    A client that goes away is noticed at once, and aborts its request. One that stops reading stops
    what is sent to it, not the engine; the operating system ends its connection after a while.
    """

    def __init__(self, answer: Answer, reader: OutputReader, heartbeat_interval: float) -> None:
        super().__init__(headers=_EVENTS)
        del self.headers["content-length"]
        self._answer, self._reader = answer, reader
        self._interval = heartbeat_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with _watched(self._reader, receive, self._interval):
            try:
                while not self._reader.is_over:
                    outputs = await self._reader.read()
                    body = _HEARTBEAT
                    if _is_large(outputs):
                        body = await asyncio.to_thread(self._answer.events, outputs)
                    elif outputs:
                        body = self._answer.events(outputs)
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                end = self._answer.last_events()
            except EngineDeadError as error:
                end = ApiError.of(error).event()
            await send({"type": "http.response.body", "body": end})


def _is_large(outputs: Iterable[RequestOutput]) -> bool:
    """Tell whether writing them would hold the event loop for more than a hundredth of a second."""
    num_entries = 0
    for output in outputs:
        num_entries += len(output.prompt_logprobs or ())
        for completion in output.outputs:
            num_entries += len(completion.logprobs or ()) + len(completion.token_ids) // 16
    return num_entries > _MOST_ENTRIES


def _encoded(whole: dict[str, Any]) -> bytes:
    """The JSON of an answer, as `JSONResponse` writes it. Its choices are encoded one by one: the
    interpreter's lock is held for each, and all together may be many megabytes."""
    encode = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    fields = []
    for name, value in whole.items():
        text = f"[{','.join(map(encode, value))}]" if name == "choices" else encode(value)
        fields.append(f"{encode(name)}:{text}")
    return f"{{{','.join(fields)}}}".encode()


@asynccontextmanager
async def _watched(
    reader: OutputReader, receive: Receive, interval: float | None = None
) -> AsyncIterator[None]:
    """Close the reader when its client goes away, which nothing else would tell; and in the end.

    Every `interval` seconds whoever waits for outputs is woken, and finds none.
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
