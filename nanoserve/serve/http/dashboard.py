"""The live view `GET /live`, which streams the state of the engine as server-sent events.

Without watchers, the engine is not observed. With watchers, each step is only counted. At most ten
times per second, the state of the engine is read between two steps, and all watchers are sent the
difference from the previous state. Nothing is queued for a watcher. A watcher that has missed a
difference is sent a complete snapshot, so slow watchers cost no more memory than fast ones.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from nanoserve.engine.guard import GuardedEngine
from nanoserve.serve.http.dashboard_state import (
    State,
    change,
    read_state,
    snapshot,
    start_counting,
    stop_counting,
)
from nanoserve.serve.http.errors import ApiError

logger = logging.getLogger(__name__)

# Runs a function on the engine's thread, between two steps, in order of the calls.
CallInEngine = Callable[[Callable[[GuardedEngine], Any]], Awaitable[Any]]

MAX_WATCHERS = 16
_INTERVAL = 0.1  # least time between two events, in seconds
_HEARTBEAT = 15.0  # seconds of silence before a comment that keeps proxies from disconnecting
_MOST_SHARE = 0.05  # largest fraction of the time spent on reads; 10^5 blocks take milliseconds


class LiveView:
    """A live view of one engine, shared by all watchers.

    call_in_engine: calls a function with the `GuardedEngine` and returns its result.
    """

    def __init__(
        self,
        call_in_engine: CallInEngine,
        interval: float = _INTERVAL,
        heartbeat: float = _HEARTBEAT,
    ) -> None:
        self._call, self._interval, self._heartbeat = call_in_engine, interval, heartbeat
        self.num_watchers = 0
        self._follower: asyncio.Task[None] | None = None
        self._state: State | None = None
        self._version = 0
        self._last_change = self._last_snapshot = ""  # encoded when a watcher needs it
        self._news = asyncio.Event()  # a new one for every version
        self._closed = False

    @property
    def is_full(self) -> bool:
        return self._closed or self.num_watchers >= MAX_WATCHERS

    def close(self) -> None:
        """End all streams, because a server waits for its open responses when it shuts down."""
        self._closed = True
        self._announce()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count a watcher while it reads `events`.

        The first watcher starts the observation, and the last watcher ends it.
        """
        self.num_watchers += 1
        if self._follower is None or self._follower.done():
            self._follower = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self._follower.cancel()
                self._follower = self._state = None

    async def events(self) -> AsyncIterator[str]:
        """Yield a snapshot, then changes; a new snapshot replaces missed changes.

        Ends when the engine can no longer be read.
        """
        seen = None
        while not self._closed and self._follower is not None:
            news = self._news
            if self._state is not None and self._version != seen:
                is_next = seen is not None and self._version == seen + 1
                seen = self._version
                yield self._change_event() if is_next else self._snapshot_event()
            elif self._follower.done():
                return
            else:
                try:
                    await asyncio.wait_for(news.wait(), self._heartbeat)
                except asyncio.TimeoutError:
                    yield ": still here\n\n"

    async def _follow(self) -> None:
        """Read the state of the engine periodically, and wake the watchers."""
        try:
            await self._call(start_counting)
            num_steps = None  # step count of the last state, if that was idle
            while True:
                seconds, state = 0.0, await self._call(partial(read_state, num_steps))
                if state is not None:
                    num_steps = state.numbers["num_steps"] if state.is_idle else None
                    seconds = self._publish(state)
                await asyncio.sleep(max(self._interval, seconds / _MOST_SHARE))
        except Exception:
            logger.exception("the live view of the engine has failed and ends")
        finally:
            self._announce()
            with contextlib.suppress(Exception):  # an engine that has ended has no observers
                await self._call(stop_counting)

    def _publish(self, state: State) -> float:
        """Make `state` the current state; return the seconds that this took on both threads."""
        began = time.perf_counter()
        before, self._state = self._state, state
        self._version += 1
        self._last_snapshot = ""
        self._last_change = "" if before is None else _event("change", change(before, state))
        self._announce()
        return state.read_seconds + time.perf_counter() - began

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _change_event(self) -> str:
        return self._last_change or self._snapshot_event()

    def _snapshot_event(self) -> str:
        if not self._last_snapshot:
            self._last_snapshot = _event("snapshot", snapshot(self._state))
        return self._last_snapshot


class LiveResponse(StreamingResponse):
    """A stream of the live view for one watcher; returns 503 if there are too many watchers."""

    def __init__(self, view: LiveView) -> None:
        # Keeps proxies from buffering events.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(view.events(), media_type="text/event-stream", headers=headers)
        self._view = view

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._view.is_full:
            await _too_many()(scope, receive, send)
            return
        with self._view.watching():  # not in `events`: a cancelled send would leave it open
            await super().__call__(scope, receive, send)


def add_live(app: FastAPI, call_in_engine: CallInEngine) -> LiveView:
    """Serve `GET /live`, and return the view, to be closed before the server shuts down."""
    view = LiveView(call_in_engine)

    async def live(request: Request) -> Response:
        return no_stream() if request.method == "HEAD" else LiveResponse(view)

    add_stream(app, live)
    return view


def add_stream(app: FastAPI, endpoint: Callable[..., Awaitable[Response]]) -> None:
    """Add the route of the live view."""
    app.add_api_route(
        "/live", endpoint, methods=["GET", "HEAD"], include_in_schema=False, response_model=None
    )


def no_stream() -> Response:
    """Return the answer to HEAD: the stream itself would not end."""
    return Response(media_type="text/event-stream")


def _too_many() -> JSONResponse:
    message = f"the live view already has {MAX_WATCHERS} watchers: try again later"
    return ApiError(
        503, message, code="too_many_watchers", headers={"retry-after": "10"}
    ).response()


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
