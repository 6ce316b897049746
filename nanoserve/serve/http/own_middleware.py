"""Middleware of the user's own around all endpoints (`--middleware`), as in vLLM."""

import inspect
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI

from nanoserve.utils.registry import import_location


def load_middleware(location: str) -> Callable[..., Any]:
    """Import the ASGI middleware class or the coroutine function at "module:name".

    "package.module.name" is accepted as well, which is vLLM's notation. Raises `ValueError` for
    what cannot be imported and for anything else, before a model is loaded.
    """
    rule = "must be the 'module:name' of an ASGI middleware class or of an async function"
    module, colon, name = location.partition(":")
    if not colon:
        module, _, name = location.rpartition(".")
    try:
        found = import_location(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        hint = "its folder must be in PYTHONPATH"
        raise ValueError(f"middleware={location!r:.200} {rule} ({error}); {hint}") from error
    if not inspect.isclass(found) and not inspect.iscoroutinefunction(found):
        raise ValueError(f"middleware={location!r:.200} {rule}, not {type(found).__name__}")
    arguments = ("app",) if inspect.isclass(found) else ("request", "call_next")
    try:
        inspect.signature(found).bind(*arguments)
    except (TypeError, ValueError) as error:  # a `ValueError`: nothing is known of its arguments
        message = f"is called with ({', '.join(arguments)}): {error}"
        raise ValueError(f"middleware={location!r:.200} {message}") from error
    return found


def add_middleware(app: FastAPI, locations: list[str]) -> None:
    """Add middleware, the last location outermost.

    A class is called with the ASGI application, and a function with the request and `call_next`.
    """
    for location in locations:
        found = load_middleware(location)
        if inspect.isclass(found):
            app.add_middleware(cast(Any, found))
        else:
            app.middleware("http")(found)
