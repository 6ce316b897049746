"""Defaults of the server for fields that a request does not set."""

from nanoserve.serve.http.protocol import (
    Body,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from nanoserve.serve.http.settings import ServerSettings


def set_defaults(body: Body, settings: ServerSettings) -> None:
    """Set fields of `body` that the server has defaults for, in place.

    `Templates` has those of chat templates.
    """
    if not isinstance(body, GenerationBody) or isinstance(body, TokenizeBody):
        return
    if settings.return_tokens_as_token_ids and body.return_tokens_as_token_ids is None:
        body.return_tokens_as_token_ids = True
    if settings.enable_force_include_usage and body.stream:
        options = body.stream_options or StreamOptions()
        body.stream_options = options.model_copy(update={"include_usage": True})
