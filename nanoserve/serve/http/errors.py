"""Error responses in OpenAI's format."""

import json
import re
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from nanoserve.engine.text_limit import ContextLengthError
from nanoserve.serve.engine_thread import EngineAsleepError, EngineDeadError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_MOST_ERRORS = 1000


class ApiError(Exception):
    """An error response with an HTTP status, a message, the wrong field and a code for programs.

    param: the request field that the error is about, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def content(self) -> dict[str, Any]:
        """The JSON body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": _TYPES.get(self.status, kind)}
        return {"error": error | {"param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """Return a server-sent event, for a stream whose status line has already been sent."""
        return f"data: {json.dumps(self.content)}\n\n".encode()

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """Convert an exception to an error response.

        Only messages that are written for clients are passed on; others become a plain 500.
        """
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ValidationError):
            return cls._of_fields(error)
        if isinstance(error, ContextLengthError):
            return cls(400, str(error), code="context_length_exceeded")
        if isinstance(error, ValueError):  # engine messages begin with `name=value` or `name: `
            found = re.match(r"(\w+)(=|: )", str(error))
            return cls(400, str(error), found[1] if found else None)
        if isinstance(error, EngineAsleepError):
            return cls(503, str(error), code="engine_asleep", headers={"retry-after": "5"})
        if isinstance(error, EngineDeadError):
            return cls(503, str(error), code="engine_dead")
        return cls.internal()

    @classmethod
    def too_long(cls, error: ContextLengthError, param: str) -> "ApiError":
        """Return the error for a prompt that exceeds the context; `param` is its field.

        The message repeats the error code, because some clients (LangChain) look for it there.
        """
        code = "context_length_exceeded"
        return cls(400, f"{error} ({code})", param, code)

    @classmethod
    def internal(cls) -> "ApiError":
        """Return the response to a fault of the server itself."""
        return cls(500, "internal server error; see the server's log for details")

    @classmethod
    def _of_fields(cls, error: ValidationError) -> "ApiError":
        """Return the error for the first wrong field, with all types that it may have.

        Validation of lists and dictionaries stops at their first error (see
        `nanoserve.serve.http.protocol`), so each field has only a few errors.
        """
        if error.error_count() > _MOST_ERRORS:  # pydantic makes a dictionary of each
            return cls(400, f"the body has {error.error_count()} fields of a wrong type")
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        path = errors[0]["loc"]
        if not path:  # not JSON, or not an object
            return cls(400, f"the body cannot be read: {errors[0]['msg']}")
        wrong = {one["msg"]: None for one in errors if one["loc"][:1] == path[:1]}
        return cls(400, f"{path[0]}: {', or '.join(wrong)}", str(path[0]))
