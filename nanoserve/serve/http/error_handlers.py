"""Convert exceptions of endpoints to error responses."""

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from nanoserve.serve.engine_thread import EngineAsleepError, EngineDeadError
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.messages.errors import error_response
from nanoserve.serve.http.middleware import named, request_id_of
from nanoserve.serve.http.root_path import path_of
from nanoserve.serve.http.unsupported_endpoints import is_refused, missing_endpoint


def add_error_handlers(app: FastAPI) -> None:
    """Answer each exception in the format of the API that the request has used."""
    for kind in (ApiError, HTTPException, EngineDeadError, EngineAsleepError, Exception):
        app.add_exception_handler(kind, _error_response)


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    """Convert any exception to an error response in the format of its API."""
    if isinstance(error, HTTPException):
        error = _of_routing(request, error)
    elif isinstance(error, ValueError):  # faults of the client were reported as `ApiError` before
        error = ApiError.internal()
    answer = ApiError.of(error)
    if answer.status == 500:
        answer.headers = named(answer.headers, request.scope)
    return error_response(answer, path_of(request.scope), request_id_of(request.scope))


def _of_routing(request: Request, error: HTTPException) -> ApiError:
    """Return the error for an unknown path or an unsupported method."""
    if error.status_code == 404 or is_refused(request.url.path):
        return missing_endpoint(request.method, request.url.path)
    message, headers = str(error.detail), dict(error.headers or {})
    allowed = ", ".join(sorted(Headers(headers).get("allow", "").replace(",", " ").split()))
    if error.status_code == 405 and allowed:
        message = f"{request.method} {request.url.path!r:.100} is not supported: use {allowed}"
    return ApiError(error.status_code, message, headers=headers)
