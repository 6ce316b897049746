"""A client for an ASGI application in this process, without a server and without HTTP."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger(__name__)


async def post(app: "ASGIApp", path: str, content: bytes) -> tuple[int, bytes]:
    """Post a JSON body; return the status and the body of the complete response.

    Cancelling it has the same effect as a client that disconnects.
    """
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    requests: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]
    status, pieces = 0, []

    async def receive() -> "Message":
        if not requests:
            await asyncio.get_running_loop().create_future()  # this client never disconnects
        return requests.pop()

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception as error:
        if not status:
            raise
        logger.error("%s has failed", path, exc_info=error)  # after a response with status 500
    return status, b"".join(pieces)
