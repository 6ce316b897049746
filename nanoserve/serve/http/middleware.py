"""What stands before every endpoint: who may ask, and how much may be sent."""

import asyncio
import hashlib
import hmac
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from nanoserve.serve.http.body_cost import PIECE, BodyCost
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.settings import ServerSettings

# What shows nothing of anybody's requests: whether the server is up, and the page itself.
_OPEN = ("/health", "/ping", "/version", "/metrics", "/")
_OPEN_FOLDERS = ("/page/",)


class Guard:
    """Asks for an API key where there is one. Plain ASGI, so that nothing is done per event."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        # Digests are of one length, so that comparing them takes as long for any wrong key.
        self._digests = [_digest(key.encode()) for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not _is_open(scope):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            digest = _digest(key.strip().encode("latin-1"))
            known = [hmac.compare_digest(digest, own) for own in self._digests]
            if scheme.lower() != "bearer" or not any(known):
                told = "a valid API key is needed: Authorization: Bearer KEY"
                refusal = ApiError(401, told, code="invalid_api_key", headers=_CHALLENGE)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ReceivedBody(NamedTuple):
    """A body of JSON that nobody has parsed yet. `cost` is in units of `BodyCost`."""

    content: bytearray
    cost: int

    @property
    def is_large(self) -> bool:
        """Tell whether reading it would hold the event loop for a millisecond or more."""
        return len(self.content) > _SMALL_BYTES or self.cost > _SMALL_COST


async def read_body(
    request: Request, settings: ServerSettings, least_cost: int = 0
) -> ReceivedBody:
    """Receive a body of JSON. `ApiError` if it is another thing, too long, or too long on its way,
    or has more items than a body of `max_body_bytes` needs.

    least_cost: a cost that is allowed however few bytes are: what the model itself can take.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        refusal = f"content-encoding: {encoding!r:.50} is not supported; send plain JSON"
        raise ApiError(415, refusal, headers=_CLOSE)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A page of another site can send everything else without asking the browser's leave.
        raise ApiError(415, "the content-type must be application/json", headers=_CLOSE)
    most = settings.max_body_bytes
    told = ApiError(413, f"a body may have {most} bytes, no more", headers=_CLOSE)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:
        raise told
    content, cost = bytearray(), BodyCost()
    most_cost, size = max(most // _BYTES_FOR_A_UNIT, least_cost, _SMALL_COST), 0

    async def read() -> None:
        nonlocal size
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise told
            if cost.total <= most_cost:
                content.extend(piece)
            for start in range(0, len(piece), PIECE):
                if cost.total > most_cost:
                    break  # the rest is taken, and dropped, so that its client can read an answer
                if start:  # a server that hands over all at once: others are served meanwhile
                    await asyncio.sleep(0)
                cost.add(piece[start : start + PIECE])

    try:
        await asyncio.wait_for(read(), settings.body_timeout)
    except asyncio.TimeoutError:
        late = f"the body took more than {settings.body_timeout:g} seconds"
        raise ApiError(408, late, headers=_CLOSE) from None
    if cost.total > most_cost:
        raise ApiError(413, _TOO_MANY_ITEMS.format(most_cost))
    return ReceivedBody(content, cost.total)


_SMALL_BYTES = 2**14
_SMALL_COST = 2**11  # units, 100 ns each
_BYTES_FOR_A_UNIT = 16  # 2^19 units in 8 MiB: 0.05 s of parsing
_TOO_MANY_ITEMS = (
    "the body has too many items: a number counts 1, a string 2, a name 4, a list or an object 16, "
    "and together at most {}: a sixteenth of max_body_bytes, or what the model takes"
)
_CHALLENGE = {"www-authenticate": "Bearer"}
_CLOSE = {"connection": "close"}  # what is still on its way would be read as the next request


def _is_open(scope: Scope) -> bool:
    path = scope["path"]
    is_preflight = scope["method"] == "OPTIONS"  # which carries no key
    return path in _OPEN or path.startswith(_OPEN_FOLDERS) or is_preflight


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
