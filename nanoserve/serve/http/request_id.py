"""Response header `x-request-id`, by which a client can refer to a request."""

import re
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
# A client's own id is echoed unchanged, so it may contain only these characters.
_OWN = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
_KEY = "nanoserve.request_id"


class RequestId:
    """ASGI middleware that adds the header to every response: the client's own id or a new one.

    The id is never logged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = own if _OWN.fullmatch(own) else uuid4().hex.encode()
        scope[_KEY] = request_id.decode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (_HEADER, request_id)]
            await send(message)

        await self._app(scope, receive, send_named)


def named(headers: dict[str, str] | None, scope: Scope) -> dict[str, str]:
    """Return `headers` with the request id, for a response made outside of the middleware."""
    known = {_HEADER.decode(): scope[_KEY]} if _KEY in scope else {}
    return {**(headers or {}), **known}
