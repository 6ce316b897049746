"""The number of requests in progress (`--enable-server-load-tracking`), at `/load` as in vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = "/v1/"


class ServerLoad:
    """Number of requests to POST endpoints under /v1 that are not answered completely yet."""

    def __init__(self) -> None:
        self._num_requests = 0

    async def show(self) -> dict[str, int]:
        """Return the number of requests that are being answered, streams included."""
        return {"server_load": self._num_requests}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request in progress until the context ends."""
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1


class CountRequests:
    """ASGI middleware that counts in a `ServerLoad`."""

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self._app, self._load = app, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") == "POST" and scope["path"].startswith(_PREFIX):
            with self._load.counting():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)
