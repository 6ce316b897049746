"""The web page at `/`, with a chat and a live view of the engine.

The page consists of plain files without a build step, and sends requests to this server only. Text
from the model and from users is always shown as text. As a second line of defence, the content
security policy below allows no inline scripts and no connections to other hosts.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI, Request, Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidate by ETag each time, so that updates show at once
}


@dataclass(frozen=True)
class PageFile:
    content: bytes
    media_type: str
    etag: str


def page_files() -> dict[str, PageFile]:
    """Return all files of the page by name, read once, so no requested name reaches the disk."""
    found = {}
    for file in files("nanoserve.serve.http").joinpath("page").iterdir():
        media_type = _TYPES.get(PurePath(file.name).suffix)
        if media_type is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[file.name] = PageFile(content, media_type, etag)
    return found


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its other files at `/page/...`."""
    known = page_files()

    async def index(request: Request) -> Response:
        return _answer(request, known["index.html"])

    async def part(request: Request, name: str) -> Response:
        file = known.get(name)
        if file is None:
            return Response("There is no such file.\n", 404, _HEADERS, "text/plain")
        return _answer(request, file)

    endpoints: dict[str, Callable[..., Any]] = {"/": index, "/page/{name}": part}
    for path, endpoint in endpoints.items():
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in _if_none_match(request).split(",")}
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def _if_none_match(request: Request) -> str:
    return request.headers.get("if-none-match", "")
