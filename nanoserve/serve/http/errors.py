"""What a client is told when something is wrong, in OpenAI's shape."""

import json
import re
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from nanoserve.engine.context_length import ContextLengthError
from nanoserve.serve.response_stream import EngineDeadError

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_MOST_ERRORS = 1000


class ApiError(Exception):
    """An answer other than 200; `param` is the field that is meant, `code` is for programs."""

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
        """The JSON of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": _TYPES.get(self.status, kind)}
        return {"error": error | {"param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """For a stream, whose status was sent before anything went wrong."""
        return f"data: {json.dumps(self.content)}\n\n".encode()

    def response(self) -> JSONResponse:
        return JSONResponse(self.content, self.status, self.headers)

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """For whatever was raised. Only what is meant for the client is told to it."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ValidationError):
            return cls._of_fields(error)
        if isinstance(error, ContextLengthError):
            return cls(400, str(error), code="context_length_exceeded")
        if isinstance(error, ValueError):  # the engine's, which begin with `name=value` or `name: `
            found = re.match(r"(\w+)(=|: )", str(error))
            return cls(400, str(error), found and found[1])
        if isinstance(error, EngineDeadError):
            return cls(503, str(error), code="engine_dead")
        return cls.internal()

    @classmethod
    def internal(cls) -> "ApiError":
        """For what is a fault of ours."""
        return cls(500, "internal server error; the server's log says more")

    @classmethod
    def _of_fields(cls, error: ValidationError) -> "ApiError":
        """The first field that is wrong, with all that it might have been instead.

        Lists and dictionaries stop at their first error (see `nanoserve.serve.http.first_error`), so
        there are no more than a few for each field.
        """
        if error.error_count() > _MOST_ERRORS:  # each would become a dictionary
            return cls(400, f"the body has {error.error_count()} fields of a wrong type")
        told = error.errors(include_url=False, include_context=False, include_input=False)
        path = told[0]["loc"]
        if not path:  # it is no JSON, or no object
            return cls(400, f"the body cannot be read: {told[0]['msg']}")
        wrong = {one["msg"]: None for one in told if one["loc"][:1] == path[:1]}
        return cls(400, f"{path[0]}: {', or '.join(wrong)}", str(path[0]))
