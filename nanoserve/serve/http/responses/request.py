"""The request of /v1/responses, and its translation to a chat."""

import json
from typing import Any, ClassVar

from nanoserve.serve.http.dialect import DialectBody
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import Int
from nanoserve.serve.http.responses.items import messages_of
from nanoserve.serve.http.responses.tools import chat_tool_choice, chat_tools

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# What `include` may ask for. The others belong to items that no answer here has.
_INCLUDABLE = (
    *(LOGPROBS, ENCRYPTED, "message.input_image.image_url", "code_interpreter_call.outputs"),
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    "computer_call_output.output.image_url",
)
_MOST_METADATA = 16  # pairs; a key has at most 64 and a value at most 512 characters
# Names of this API's fields for those of a chat, by regular expressions: see `renamed_fields`.
FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"response_format\.json_schema": "text.format",
    r"response_format\.schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}


class ResponsesBody(DialectBody):
    """Request body of `POST /v1/responses`."""

    prompt_field: ClassVar[str] = "input"

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    truncation: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    def check(self) -> None:
        """Raise `ApiError` for values that are not supported."""
        if self.background:
            message = "background=true is not supported: use stream=true, or `nanoserve batch`"
            raise ApiError(400, message, "background", "unsupported")
        if self.truncation not in (None, "auto", "disabled"):
            message = f"truncation={self.truncation!r:.50} must be 'disabled' or 'auto'"
            raise ApiError(400, message, "truncation")
        for name in self.include or ():
            if name not in _INCLUDABLE:
                known = ", ".join(_INCLUDABLE)
                raise ApiError(400, f"include: {name!r:.80} must be one of {known}", "include")
        if self.top_logprobs and not self.has_logprobs:
            message = f"top_logprobs needs include=[{LOGPROBS!r}]"
            raise ApiError(400, message, "top_logprobs")
        for name in ("text", "tools", "tool_choice", "reasoning"):  # the response repeats them
            _check_numbers(name, getattr(self, name))
        pairs = self.metadata or {}
        if len(pairs) > _MOST_METADATA or any(
            len(key) > 64 or len(value) > 512 for key, value in pairs.items()
        ):
            message = (
                f"metadata may have {_MOST_METADATA} pairs, with keys of at most 64 and values of "
                "at most 512 characters"
            )
            raise ApiError(400, message, "metadata")

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def encrypts_reasoning(self) -> bool:
        return ENCRYPTED in (self.include or ())

    def chat_fields(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the request as fields of `ChatBody`.

        items: the normalized items of the whole conversation, without `instructions`.
        """
        messages = messages_of(items, self.instructions or "")
        if not messages:
            raise ApiError(400, "input is empty; pass a string or at least one item", "input")
        text, reasoning = self.text or {}, self.reasoning or {}
        fields = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": chat_tools(self.tools),
            "tool_choice": chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _response_format(text.get("format")),
            "verbosity": text.get("verbosity"),
            "reasoning_effort": reasoning.get("effort"),
            "logprobs": self.has_logprobs or None,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            "stream": self.stream,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return self.extra_fields() | given


def _check_numbers(name: str, value: Any) -> None:
    """Raise `ApiError` for a number that JSON cannot have."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        message = f"{name}: NaN and numbers beyond 1.8e308 are not supported"
        raise ApiError(400, message, name) from error


def _response_format(given: Any) -> dict[str, Any] | None:
    """Return `text.format` in the form of chat completions."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema":
        known = "'text', 'json_object' or 'json_schema'"
        raise ApiError(400, f"text.format: type={kind!r:.50} must be {known}", "text.format")
    if not isinstance(given.get("schema"), dict):
        message = "text.format must be {'type': 'json_schema', 'name': ..., 'schema': {...}}"
        raise ApiError(400, message, "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}
