"""Middleware as a user of `--middleware` writes it."""

from typing import Any

NOTHING = 5


class Marking:
    """ASGI middleware that adds a header to every answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"1")]
            await send(message)

        await self._app(scope, receive, marked)


async def mark(request: Any, call_next: Any) -> Any:
    """Adds a header; refuses a request that asks for that, and fails for another one."""
    from starlette.responses import PlainTextResponse

    if "refuse" in request.query_params:
        return PlainTextResponse("refused", 418)
    if "fail" in request.query_params:
        raise RuntimeError("secret of a middleware")
    answer = await call_next(request)
    answer.headers["x-function"] = "1"
    return answer
