"""How an answer travels: in one piece, or as server-sent events while it grows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from nanoserve.server.answers import Answer
from nanoserve.server.errors import ApiError
from nanoserve.server.output_reader import EngineDeadError, OutputReader

_HEARTBEAT = b": the model is at work\n\n"  # a comment, which every reader of events skips
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
    return JSONResponse(answer.whole(outputs))


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
                    body = self._answer.events(outputs) if outputs else _HEARTBEAT
                    if body:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                end = self._answer.last_events()
            except EngineDeadError as error:
                end = ApiError.of(error).event()
            await send({"type": "http.response.body", "body": end})


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
