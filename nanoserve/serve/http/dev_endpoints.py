"""Endpoints that pause the engine, put it to sleep and replace its weights, as in vLLM.

They are for reinforcement learning and experiments: anyone who may call them can stop the server
for all others. So they exist only with `--enable-dev-endpoints`, and need the API key if one is
set. Arguments are in the query, as in `POST /sleep?level=2`.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.server_info import server_info
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.utils.checks import shown

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def add_dev_endpoints(app: FastAPI, llm: AsyncLLM, settings: ServerSettings) -> None:
    """Add the routes to the application of a server."""
    endpoints = DevEndpoints(llm, settings)
    for path, endpoint in endpoints.posts().items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    for path, endpoint in endpoints.gets().items():
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], response_model=None)


class DevEndpoints:
    """The endpoints of one engine. Another order to the engine is another entry of `posts`."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self._llm, self._settings = llm, settings
        self._origins = settings.allowed_origins

    def posts(self) -> dict[str, Callable[..., Any]]:
        return {
            "/pause": self.pause,
            "/resume": self.resume,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/update_weights": self.update_weights,
        }

    def gets(self) -> dict[str, Callable[..., Any]]:
        return {
            "/is_paused": self.is_paused,
            "/is_sleeping": self.is_sleeping,
            "/server_info": self.server_info,
        }

    async def pause(self, request: Request) -> Response:
        """Call `AsyncLLM.pause_generation`."""
        options = self._query(request, mode=str, clear_cache=_boolean)
        await _checked(self._llm.pause_generation, **options)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._query(request)
        await _checked(self._llm.resume_generation)
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: Request) -> Response:
        """Call `AsyncLLM.sleep`, which aborts running requests."""
        await _checked(self._llm.sleep, **self._query(request, level=_integer, mode=str))
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        """Call `AsyncLLM.wake_up`; `tags` may be given twice, and without it all parts wake."""
        await _checked(self._llm.wake_up, **self._query(request, tags=list))
        return Response(status_code=200)

    async def reset_prefix_cache(self, request: Request) -> Response:
        options = self._query(request, reset_running_requests=_boolean, reset_connector=_boolean)
        await _checked(self._llm.reset_prefix_cache, **options)
        return Response(status_code=200)

    async def update_weights(self, request: Request) -> Response:
        """Call `AsyncLLM.update_weights` with a folder that the server can read."""
        options = self._query(request, path=str, mode=str, version=_version)
        if "path" not in options:
            raise ApiError(400, "path is missing: a folder that this server can read", "path")
        version = await _checked(self._llm.update_weights, source=options.pop("path"), **options)
        return JSONResponse({"weights_version": version})

    async def is_paused(self) -> dict[str, bool]:
        return {"is_paused": await self._llm.is_paused()}

    async def is_sleeping(self) -> dict[str, bool]:
        return {"is_sleeping": await self._llm.is_sleeping()}

    async def server_info(self, request: Request) -> dict[str, Any]:
        """Return the options of the engine and of the server, API keys excepted."""
        self._query(request, config_format=_json_format)
        return server_info(self._llm.engine.config, self._settings)

    def _query(
        self, request: Request, **known: Callable[[Any], Any] | type[list[str]]
    ) -> dict[str, Any]:
        """Return the arguments in the query, converted by the functions in `known`.

        A `list` collects the values of an argument that is given several times. Raises `ApiError`
        for an unknown or repeated argument, an unsuitable value, a body, which nothing would read,
        and a page of another site.
        """
        self._check_origin(request)
        length = request.headers.get("content-length", "0")
        if length not in ("0", "2") or "transfer-encoding" in request.headers:  # "2" is {}
            message = "arguments are read from the query, as in /sleep?level=1: send no body"
            raise ApiError(400, message)
        found: dict[str, Any] = {}
        for name in request.query_params:
            if name not in known:
                names = ", ".join(known) or "none"
                message = f"{name!r:.100} is not an argument of {request.url.path}: use {names}"
                raise ApiError(400, message, code="unknown_argument")
            values = request.query_params.getlist(name)
            if known[name] is list:
                found[name] = values
                continue
            if len(values) > 1:
                raise ApiError(400, f"{name} is given {len(values)} times", name)
            try:
                found[name] = known[name](values[0])
            except ValueError as error:
                raise ApiError(400, f"{name}={shown(values[0])} {error}", name) from None
        return found

    def _check_origin(self, request: Request) -> None:
        """Raise `ApiError` for a page of another site: a browser needs no permission to POST."""
        origin = request.headers.get("origin")
        if origin is None or origin in self._origins or "*" in self._origins:
            return
        if urlsplit(origin).netloc != request.headers.get("host"):
            raise ApiError(403, f"the origin {origin!r:.100} is not one of --allowed-origins")


def _boolean(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError("must be true or false")
    return _BOOLEANS[text.lower()]


def _integer(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ValueError("must be an integer")
    return int(text)


def _json_format(text: str) -> str:
    if text != "json":
        raise ValueError("must be json")
    return text


def _version(text: str) -> int | str:
    """Return the version of weights: an integer if the text is one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else text


async def _checked(call: Callable[..., Any], **options: Any) -> Any:
    """Return the result of a call in the engine; arguments that it rejects are a 400."""
    try:
        return await call(**options)
    except ValueError as error:
        raise ApiError.of(error) from None
