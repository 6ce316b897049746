"""Checks before every endpoint: API keys, and limits on request bodies."""

import asyncio
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar
from uuid import uuid4

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.serve.http.body_cost import PIECE, BodyCost
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.messages.errors import error_response, is_messages
from nanoserve.serve.http.root_path import path_of
from nanoserve.serve.http.settings import ServerSettings

# Paths that need no key: the status and the page itself reveal nothing about requests.
_OPEN = (
    *("/health", "/ping", "/healthz", "/readyz", "/livez", "/version", "/metrics", "/load"),
    *("/docs", "/openapi.json", "/"),
)
_OPEN_FOLDERS = ("/page/",)


class Guard:
    """Plain ASGI middleware that requires an API key if one is set, without work per event."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        # Digests have one length, so that a comparison takes equally long for any wrong key.
        self._digests = [_digest(key.encode()) for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not _is_open(scope):
            given = map(_digest, _keys_in(Headers(scope=scope)))
            known = [hmac.compare_digest(key, own) for key in given for own in self._digests]
            if not any(known):
                message = "a valid API key is required: Authorization: Bearer KEY, or x-api-key"
                refusal = ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)
                response = error_response(refusal, scope["path"], request_id_of(scope))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ReceivedBody(NamedTuple):
    """An unparsed JSON body. `cost` is in units of `BodyCost`."""

    content: bytearray
    cost: int

    @property
    def is_large(self) -> bool:
        """Return True if parsing the body would block the event loop for a millisecond or more."""
        return len(self.content) > _SMALL_BYTES or self.cost > _SMALL_COST


async def read_body(
    request: Request, settings: ServerSettings, least_cost: int = 0
) -> ReceivedBody:
    """Receive a JSON body.

    Raises `ApiError` if it is not JSON, is longer than `max_body_bytes`, takes longer than
    `body_timeout` to arrive, or has too many items (see `BodyCost`).

    least_cost: cost of the largest input of the model, which is always allowed, whatever
    `max_body_bytes` is.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        refusal = f"content-encoding: {encoding!r:.50} is not supported; send plain JSON"
        raise ApiError(415, refusal, headers=_CLOSE)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Browsers let pages of other sites send other types without a CORS preflight.
        raise ApiError(415, "the content-type must be application/json", headers=_CLOSE)
    most = settings.max_body_bytes
    too_long = ApiError(413, f"the body may have at most {most} bytes", headers=_CLOSE)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_long
    content, cost = bytearray(), BodyCost()
    most_cost, size = max(most // _BYTES_FOR_A_UNIT, least_cost, _SMALL_COST), 0

    async def read() -> None:
        nonlocal size
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise too_long
            if cost.total <= most_cost:
                content.extend(piece)
            for start in range(0, len(piece), PIECE):
                if cost.total > most_cost:
                    break  # the rest is received and dropped, so that the client reads the error
                if start:  # the server passed a large piece: let other requests run
                    await asyncio.sleep(0)
                cost.add(piece[start : start + PIECE])

    try:
        await asyncio.wait_for(read(), settings.body_timeout)
    except asyncio.TimeoutError:
        late = f"the body took more than {settings.body_timeout:g} seconds to arrive"
        raise ApiError(408, late, headers=_CLOSE) from None
    if cost.total > most_cost:
        raise ApiError(413, _TOO_MANY_ITEMS.format(most_cost))
    return ReceivedBody(content, cost.total)


_SMALL_BYTES = 2**14
_SMALL_COST = 2**11  # units, 100 ns each
_BYTES_FOR_A_UNIT = 16  # 2^19 units in 8 MiB: 0.05 s of parsing
_TOO_MANY_ITEMS = (
    "the body has too many items: a number counts 1, a string 2, a name 4, a list or an object 16; "
    "the sum may be at most {}, which is max_body_bytes / 16 or the largest input of the model"
)
_CHALLENGE = {"www-authenticate": "Bearer"}
_CLOSE = {"connection": "close"}  # otherwise the rest of the body is parsed as the next request


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    is_preflight = scope["method"] == "OPTIONS"  # carries no key
    return path in _OPEN or path.startswith(_OPEN_FOLDERS) or is_preflight


def _keys_in(headers: Headers) -> list[bytes]:
    """Return the API keys of a request: those of OpenAI's clients and of Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    keys = [key.strip()] if scheme.lower() == "bearer" else []
    keys += [headers["x-api-key"].strip()] if "x-api-key" in headers else []
    return [key.encode("latin-1") for key in keys]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


_HEADER = b"x-request-id"
# A client's own id is echoed unchanged, so it may contain only these characters.
_OWN = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
_KEY = "nanoserve.request_id"


class RequestId:
    """ASGI middleware that adds the client's id, or a new one, to the header of every response.

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
                own = [(name, request_id) for name in _id_headers(scope)]
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        await self._app(scope, receive, send_named)


def _id_headers(scope: Scope) -> tuple[bytes, ...]:
    """Return the names of the headers with the id of a request."""
    return (_HEADER, b"request-id") if is_messages(path_of(scope)) else (_HEADER,)


def request_id_of(scope: Scope) -> str | None:
    """Return the id of a request; None without the middleware."""
    return scope.get(_KEY)


def named(headers: dict[str, str] | None, scope: Scope) -> dict[str, str]:
    """Return `headers` with the request id, for a response made outside the middleware."""
    names = _id_headers(scope) if _KEY in scope else ()
    known = {name.decode(): scope[_KEY] for name in names}
    return {**(headers or {}), **known}


T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """Limits `make()` to one call at a time, with at least `interval` seconds between two calls.

    Callers that arrive meanwhile wait for the next result and share it, so the age of a result is
    at most the time that `make` takes. The rate of calls is bounded for any number of callers; an
    occasional single caller does not wait.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], interval: float) -> None:
        self._make, self._interval = make, interval
        self._next: asyncio.Task[T] | None = None
        self._last_end = float("-inf")

    async def get(self) -> T:
        """Return the next result of `make`, or raise what it raises."""
        if self._next is None or self._next.done():
            self._next = asyncio.create_task(self._run())
        return await asyncio.shield(self._next)  # a waiting caller may be cancelled

    async def _run(self) -> T:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._last_end + self._interval - clock()))
        try:
            return await self._make()
        finally:
            self._last_end = clock()
