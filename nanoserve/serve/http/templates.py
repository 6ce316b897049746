"""The chat template of a request: the model's, a generic one, or the request's own."""

import logging

from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody, Rendering
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.http.tools.parsers import FORMATS, ToolFormat, formats_of
from nanoserve.text.chat import looks_into_content
from nanoserve.text.chat_template import check_template
from nanoserve.text.fallback_template import FallbackTemplate, fallback_for
from nanoserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Templates:
    """Chooses the template of each request, and the format of calls that it shows."""

    def __init__(self, settings: ServerSettings, tokenizer: Tokenizer) -> None:
        self._settings = settings
        self._fallback: FallbackTemplate | None = None
        own = tokenizer.chat_template
        self._usual = Rendering()
        if not tokenizer.has_chat_template:
            self._fallback = found = fallback_for(tokenizer.special_tokens)
            ids = map(tokenizer.special_tokens.id_of, found.stop_tokens)
            known = tuple(token_id for token_id in ids if token_id is not None)
            self._usual = Rendering(found.text, False, known, found.stop)
            logger.warning(
                "the model has no chat template: conversations are written as %s, and an answer "
                "ends at %s. If it was trained on another format, pass --chat-template FILE",
                found.name,
                " or ".join(map(repr, found.stop_tokens + found.stop)),
            )
        self.source: str = self._usual.template or own or ""
        variables = settings.default_chat_template_kwargs
        as_parts = self._wants_parts(self.source)
        self._usual = self._usual._replace(as_parts=as_parts, variables=variables)
        self._known, self.reasoning_parser = formats_of(
            settings.tool_call_parser, settings.reasoning_parser, self.source
        )

    def apply(self, body: ChatBody) -> str:
        """Set how the conversation of a request is rendered; return the source of its template.

        Raises `ApiError` for a template of the request's own, unless the server trusts it.
        """
        own = body.chat_template
        if own is None:
            body.render_with(self._usual)
            return self.source
        if not self._settings.trust_request_chat_template:
            message = (
                "chat_template is not supported by this server, since a template is a program: "
                "start it with --trust-request-chat-template, or with --chat-template FILE"
            )
            raise ApiError(400, message, "chat_template", "unsupported")
        try:
            check_template(own)  # never a file of the server
        except ValueError as error:
            raise ApiError(400, str(error), "chat_template") from error
        variables = self._settings.default_chat_template_kwargs
        body.render_with(Rendering(own, self._wants_parts(own), variables=variables))
        return own

    @property
    def shows_tools(self) -> bool:
        """True if the template shows tools to the model, in a format that is known."""
        return self._known is not None and "tools" in self.source

    def tool_format(self, body: ChatBody) -> tuple[ToolFormat, bool]:
        """Return the format of calls for a request, and whether its template shows tools."""
        known, source = self._known, self.source
        if body.chat_template is not None:
            source = body.chat_template
            known, _ = formats_of(self._settings.tool_call_parser, self.reasoning_parser, source)
        # A model that is forced to call a tool can be forced to use any format.
        return known or FORMATS["hermes"], known is not None and "tools" in source

    def _wants_parts(self, template: str) -> bool:
        """Return True if the template gets the content of messages as lists of parts."""
        wanted = self._settings.chat_template_content_format
        return wanted == "openai" or (wanted == "auto" and looks_into_content(template))
