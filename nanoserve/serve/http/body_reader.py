"""Read the bodies of requests, check their fields, and set the server's defaults."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.middleware import read_body
from nanoserve.serve.http.protocol import Body, ChatBody
from nanoserve.serve.http.server_defaults import set_defaults
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.http.templates import Templates
from nanoserve.serve.http.unknown_fields import UnknownNames, check_fields

T = TypeVar("T")
BodyType = TypeVar("BodyType", bound=Body)
# Called with (body, names that were logged, source of the chat template).
Check = Callable[[Any, UnknownNames, str], None]

_OTHER_ITEMS = 2**16  # in addition to a prompt and a bias for each token; see `BodyCost`
_MOST_LISTED = 20  # models in an error message


class BodyReader:
    """Reads the bodies of all endpoints of a server.

    names: the served models. longest: number of token ids and biases that a body may have.
    """

    def __init__(
        self, settings: ServerSettings, templates: Templates, names: list[str], longest: int
    ) -> None:
        self._settings, self._templates, self._names = settings, templates, names
        self._least_cost = longest + _OTHER_ITEMS
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="nanoserve bodies")
        self._unknown_names = UnknownNames()

    async def read(
        self, request: Request, kind: type[BodyType], check: Check = check_fields
    ) -> BodyType:
        """Return the body of a request, validated as far as possible without the engine.

        check: see `checked`.
        """
        received = await read_body(request, self._settings, self._least_cost)

        def read() -> BodyType:
            body = kind.model_validate_json(received.content)
            return self.checked(body, received.is_large, check)

        return await self.read_in_turn(read, received.is_large)

    async def read_in_turn(self, read: Callable[[], T], is_large: bool) -> T:
        """Call `read()`, off the event loop for a large body; a `ValueError` returns 400."""
        try:
            if not is_large:
                return read()
            # One thread, so one large body at a time. The event loop runs between two of them.
            return await asyncio.get_running_loop().run_in_executor(self._reading, read)
        except ValueError as error:
            raise ApiError.of(error) from None

    def checked(self, body: BodyType, is_large: bool, check: Check = check_fields) -> BodyType:
        """Return a body with the server's defaults.

        check: raises `ApiError` for fields that are not supported. Another one is raised for a
        model that is not served.
        """
        if body.model is not None:
            self.check_model(body.model)
        body.note_size(is_large)
        set_defaults(body, self._settings)
        template = self._templates.source
        if isinstance(body, ChatBody):
            template = self._templates.apply(body)
        check(body, self._unknown_names, template)
        return body

    def check_model(self, name: str) -> None:
        """Raise `ApiError` for a model that is not served."""
        if name not in self._names:
            served = ", ".join(self._names[:_MOST_LISTED])
            more = ", ..." if len(self._names) > _MOST_LISTED else ""
            message = f"the model {name!r:.200} does not exist; available: {served}{more}"
            raise ApiError(404, message, "model", "model_not_found")
