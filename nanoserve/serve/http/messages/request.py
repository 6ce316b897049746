"""The request of /v1/messages, and its translation to a chat."""

from typing import Any, ClassVar

from nanoserve.serve.http.dialect import DialectBody
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.messages.content import messages_of
from nanoserve.serve.http.protocol import THINKING_SWITCHES, Int, looks_at
from nanoserve.serve.http.templates import Templates
from nanoserve.serve.http.tools.reasoning import REASONING

# Names of this API's fields for those of a chat, by regular expressions: see `renamed_fields`.
FIELD_NAMES = {
    "max_completion_tokens": "max_tokens",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "tool_choice='required'": "tool_choice 'any'",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_IS_ON = {"enabled": True, "adaptive": True, "disabled": False}
NO_SERVER_TOOLS = "the server runs no tools: give the model a tool with an input_schema"


class MessagesBody(DialectBody):
    """Request body of `POST /v1/messages`."""

    prompt_field: ClassVar[str] = "messages"
    same: ClassVar[frozenset[str]] = (DialectBody.same - {"stop"}) | {"verbosity"}

    messages: list[dict[str, Any]]
    max_tokens: Int
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None

    @property
    def hides_thinking(self) -> bool:
        return (self.thinking or {}).get("display") == "omitted"

    def chat_fields(self, templates: Templates) -> dict[str, Any]:
        """Return the request as fields of `ChatBody`; `templates`: those of the server."""
        if not self.messages:
            raise ApiError(400, "messages is empty; pass at least one message", "messages")
        messages = messages_of(self.messages, self.system)
        output = self.output_config or {}
        choice, is_single = _tool_choice(self.tool_choice)
        fields = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "tools": _chat_tools(self.tools),
            "tool_choice": choice,
            "parallel_tool_calls": False if is_single else None,
            "response_format": _response_format(output.get("format")),
            "reasoning_effort": output.get("effort"),
            "stream": self.stream,
        }
        last = messages[-1]
        if last["role"] == "assistant":
            if "tool_calls" in last:
                message = "messages: the last one has tool_use without a tool_result after it"
                raise ApiError(400, message, "messages")
            fields["continue_final_message"] = True
        given = {name: value for name, value in fields.items() if value is not None}
        extra = self.extra_fields()
        return extra | given | self._thinking_fields(templates, extra)

    def _thinking_fields(self, templates: Templates, extra: dict[str, Any]) -> dict[str, Any]:
        """Return the field `thinking` as variables of the template, and as a budget.

        A budget is a target in this API, and is left out where it cannot be enforced.
        """
        if self.thinking is None:
            return {}
        kind = self.thinking.get("type")
        if not isinstance(kind, str) or kind not in _IS_ON:
            message = f"thinking: type={kind!r:.50} must be one of {tuple(_IS_ON)}"
            raise ApiError(400, message, "thinking", "unsupported")
        template = extra.get("chat_template")
        source = template if isinstance(template, str) else templates.source
        names = [name for name in THINKING_SWITCHES if looks_at(source, name)] or [
            THINKING_SWITCHES[0]
        ]
        own = extra.get("chat_template_kwargs") or {}
        if not isinstance(own, dict):  # `ChatBody` refuses it
            return {}
        fields: dict[str, Any] = {"chat_template_kwargs": dict.fromkeys(names, _IS_ON[kind]) | own}
        budget = self.thinking.get("budget_tokens")
        if kind == "enabled" and not _is_whole(budget):
            message = f"thinking: budget_tokens={budget!r:.50} must be an integer"
            raise ApiError(400, message, "thinking")
        if kind == "enabled" and templates.reasoning_parser in REASONING:
            fields["thinking_token_budget"] = budget
        return fields


class CountBody(MessagesBody):
    """Request body of `POST /v1/messages/count_tokens`."""

    max_tokens: Int | None = None  # here optional


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools of a request as chat completions have them."""
    return None if tools is None else [_chat_tool(tool, i) for i, tool in enumerate(tools)]


def _chat_tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    place, kind = f"tools[{number}]", tool.get("type")
    if kind not in (None, "custom"):
        message = f"{place}: type={kind!r:.80} is not supported: {NO_SERVER_TOOLS}"
        raise ApiError(400, message, f"{place}.type", "unsupported")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        message = f"{place} must be {{'name': ..., 'description': ..., 'input_schema': {{...}}}}"
        raise ApiError(400, message, place)
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    names["strict"] = "strict"
    given = {ours: tool[name] for name, ours in names.items() if tool.get(name) is not None}
    return {"type": "function", "function": given}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[Any, bool]:
    """Return a `tool_choice` as chat completions have it, and whether one call is the most."""
    if choice is None:
        return None, False
    kind = choice.get("type")
    is_single = choice.get("disable_parallel_tool_use") is True
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}, is_single
    if not isinstance(kind, str) or kind not in _CHOICES:
        known = "'auto', 'any', 'none', or 'tool' with a name"
        message = f"tool_choice={choice!r:.100} must have the type {known}"
        raise ApiError(400, message, "tool_choice")
    return _CHOICES[kind], is_single


def _response_format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    is_schema = isinstance(given, dict) and given.get("type") == "json_schema"
    if not is_schema or not isinstance(given.get("schema"), dict):
        message = "output_config.format must be {'type': 'json_schema', 'schema': {...}}"
        raise ApiError(400, message, "output_config.format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given["schema"]}}
