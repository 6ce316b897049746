"""Names of the fields of /v1/messages, and which of them are refused."""

from functools import partial
from typing import Any

from nanoserve.compat.request_names import Foreign
from nanoserve.serve.http.dialect import foreign_names
from nanoserve.serve.http.messages.request import NO_SERVER_TOOLS, MessagesBody
from nanoserve.serve.http.unknown_fields import Places, UnknownNames, check_names, check_place

_WHOLE = "an answer continues the last message if that is the assistant's"
_NO_SUMMARY = "the server does not summarize: ask the model for a summary in a message"
_KEEP_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

# Refused by this API, in addition to what chat completions refuse.
OWN = {
    "container": Foreign(NO_SERVER_TOOLS),
    "mcp_servers": Foreign(NO_SERVER_TOOLS, ([],)),
    "context_management": Foreign(
        "the context is not edited: shorten messages", ({}, {"edits": []}, _KEEP_THOUGHTS)
    ),
    "compaction": Foreign(_NO_SUMMARY),
    "thread": Foreign("send the whole conversation in messages"),  # clients do so after this error
    "stop": Foreign("use stop_sequences", ([],)),
    "max_completion_tokens": Foreign("use max_tokens"),
    "response_format": Foreign('use output_config={"format": {"type": "json_schema", ...}}'),
    "output_format": Foreign('use output_config={"format": {"type": "json_schema", ...}}'),
    "reasoning_effort": Foreign('use output_config={"effort": ...}'),
    "parallel_tool_calls": Foreign(
        'use tool_choice={"type": "auto", "disable_parallel_tool_use": true}', (True,)
    ),
    "continue_final_message": Foreign(_WHOLE, (False,)),
    "add_generation_prompt": Foreign(_WHOLE, (True,)),
    "logprobs": Foreign("use /v1/chat/completions", (False,)),
    "top_logprobs": Foreign("use /v1/chat/completions", (0,)),
    "echo": Foreign("an answer has no prompt", (False,)),
    "return_token_ids": Foreign("use /v1/chat/completions", (False,)),
    "return_tokens_as_token_ids": Foreign("use /v1/chat/completions", (False,)),
    "prompt": Foreign("use messages"),
    "stream_options": Foreign(
        "streams end with their usage", ({}, {"include_usage": True}, {"include_usage": False})
    ),
}
_ADVICE = {
    "use stop": "use stop_sequences",
    "use response_format": OWN["response_format"].instead,
    "use reasoning_effort": 'use thinking={"type": ...}, or output_config={"effort": ...}',
    "use logprobs": "use /v1/chat/completions",
    "use prompt": "use messages",
    "send it as a message": "use system",
}
FOREIGN = foreign_names(OWN, _ADVICE)
# Anthropic's fields without an influence on the answer, in addition to those of chat completions.
# `fallbacks` are for a model that declines by a policy of its own.
HARMLESS = frozenset(
    {"diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
    | {"billing_policy", "fallbacks", "fallback_credit_token"}
)
_CACHED = frozenset({"type", "cache_control"})
_NO_CALLERS = Foreign("only the model itself calls tools", (["direct"],))
# By object: its known names, and the refused ones.
PLACES: Places = {
    "tools": (
        _CACHED | {"name", "description", "input_schema", "strict", "defer_loading"}
        | {"eager_input_streaming"},
        {
            "parameters": Foreign("use input_schema"),
            "allowed_callers": _NO_CALLERS,
            "input_examples": Foreign("put examples into the description", ([],)),
        },
    ),
    "tool_choice": (frozenset({"type", "name", "disable_parallel_tool_use"}), {}),
    # Thoughts are bound to no conversation, so that none fails a check of its binding.
    "thinking": (frozenset({"type", "budget_tokens", "display", "block_binding"}), {}),
    "output_config": (
        frozenset({"effort", "format"}),
        {"task_budget": Foreign("use max_tokens")},
    ),
    "output_config.format": (frozenset({"type", "schema"}), {}),
    "messages": (
        frozenset({"role", "content"}),
        {
            "clear_at": Foreign("leave the message out of later requests", ("never",)),
            "output_config": Foreign("use output_config of the request", ({},)),
        },
    ),
    "messages.content": (
        _CACHED | {"text", "citations", "thinking", "signature", "data", "id", "name", "input"}
        | {"tool_use_id", "content", "is_error", "caller"},
        {"toolset_name": Foreign("a tool has one name")},
    ),
}  # fmt: skip


_check_place = partial(check_place, PLACES)


def check_messages_fields(body: MessagesBody, unknown: UnknownNames, template: str = "") -> None:
    """Raise `ApiError` for a field of the request that is not supported."""
    given = body.model_extra or {}
    known = body.passed_on() | HARMLESS | type(body).model_fields.keys()
    check_names(given, "", known, FOREIGN, unknown)
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type") in (None, "custom"):
            _check_place(tool, "tools", unknown, path=f"tools[{number}]")
    for place in ("tool_choice", "thinking", "output_config"):
        _check_place(getattr(body, place), place, unknown)
    _check_place((body.output_config or {}).get("format"), "output_config.format", unknown)
    for number, message in enumerate(body.messages):
        place = f"messages.{number}"
        _check_place(message, "messages", unknown, path=place)
        _check_blocks(message.get("content"), f"{place}.content", unknown)
    _check_blocks(body.system, "system", unknown)


def _check_blocks(content: Any, place: str, unknown: UnknownNames) -> None:
    """Check the blocks of a content, and those inside of the results of tools."""
    for index, block in enumerate(content if isinstance(content, list) else ()):
        path = f"{place}.{index}"
        _check_place(block, "messages.content", unknown, path=path)
        if isinstance(block, dict) and block.get("type") == "tool_result":
            inner = block.get("content")
            for number, part in enumerate(inner if isinstance(inner, list) else ()):
                _check_place(part, "messages.content", unknown, path=f"{path}.content.{number}")
