"""Errors in the format of the Messages API."""

import json
from typing import Any

from fastapi.responses import JSONResponse

from nanoserve.serve.http.errors import ApiError

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_content(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error."""
    message = str(error)
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # coding agents search for these words
    kind = _TYPES.get(error.status, "api_error" if error.status > 500 else "invalid_request_error")
    content: dict[str, Any] = {"type": kind, "message": message}
    if error.param == "thread":  # by this code the client library goes on without it
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        content["details"] = details
    return {"type": "error", "error": content}


def is_messages(path: str) -> bool:
    """Return True for a path of this API."""
    return path == PATH or path.startswith(f"{PATH}/")


def error_response(error: ApiError, path: str, request_id: str | None = None) -> JSONResponse:
    """Return an error in the format of the API to which `path` belongs."""
    if not is_messages(path):
        return error.response()
    content = error_content(error) | {"request_id": request_id}
    return JSONResponse(content, error.status, error.headers)


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream."""
    return f"event: error\ndata: {json.dumps(error_content(error))}\n\n".encode()
