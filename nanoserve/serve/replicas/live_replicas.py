"""A live view of several engines, in which a watcher chooses the replica to see."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from nanoserve.engine.guard import GuardedEngine
from nanoserve.serve.http.dashboard import LiveResponse, LiveView, add_stream, no_stream
from nanoserve.serve.http.errors import ApiError

CallInReplica = Callable[[int, Callable[[GuardedEngine], Any]], Awaitable[Any]]


class LiveReplicas:
    """The live view `GET /live?replica=1` of replicas, by default of the first replica.

    Its stream begins with an additional event `replicas`, with the numbers of all replicas and of
    the replica that is shown.
    """

    def __init__(
        self, app: FastAPI, call: CallInReplica, numbers: Callable[[], Collection[int]]
    ) -> None:
        self._call, self._numbers = call, numbers
        self._views: dict[int, LiveView] = {}

        async def live(request: Request, replica: int | None = None) -> Response:
            view = self._view(replica)
            return no_stream() if request.method == "HEAD" else LiveResponse(view)

        add_stream(app, live)

    def close(self) -> None:
        for view in self._views.values():
            view.close()

    def _view(self, chosen: int | None) -> LiveView:
        numbers = sorted(self._numbers())
        number = chosen if chosen is not None or not numbers else numbers[0]
        if number not in numbers:
            raise ApiError(404, f"replica={number} must be one of {numbers}", "replica")
        if number not in self._views:
            self._views[number] = ReplicaView(number, partial(self._call, number), self._numbers)
        return self._views[number]


class ReplicaView(LiveView):
    """A live view of one replica, which also lists the other replicas."""

    def __init__(
        self,
        number: int,
        call: Callable[[Callable[[GuardedEngine], Any]], Awaitable[Any]],
        numbers: Callable[[], Collection[int]],
    ) -> None:
        super().__init__(call)
        self._number, self._numbers = number, numbers

    async def events(self) -> AsyncIterator[str]:
        shown = {"replicas": sorted(self._numbers()), "shown": self._number}
        yield f"event: replicas\ndata: {json.dumps(shown)}\n\n"
        async for event in super().events():
            yield event
