"""The number of requests in progress (`--enable-server-load-tracking`), at `/load` as in vLLM."""

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = "/v1/"


class ServerLoad:
    """Number of requests to POST endpoints under /v1 that are not answered completely yet."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def show(self) -> dict[str, int]:
        """Return the number of requests that are being answered, streams included."""
        return {"server_load": self.num_requests}


class CountRequests:
    """ASGI middleware that counts in a `ServerLoad`."""

    def __init__(self, app: ASGIApp, load: ServerLoad) -> None:
        self._app, self._load = app, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_counted = scope.get("method") == "POST" and scope["path"].startswith(_PREFIX)
        self._load.num_requests += is_counted
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.num_requests -= is_counted
