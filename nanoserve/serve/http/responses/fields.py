"""Names of the fields of /v1/responses, and which of them are refused."""

from functools import partial

from nanoserve.compat.request_names import Foreign
from nanoserve.serve.http.dialect import foreign_names
from nanoserve.serve.http.responses.request import ResponsesBody
from nanoserve.serve.http.unknown_fields import Places, UnknownNames, check_names, check_place

_SEND_ITEMS = "use previous_response_id, or send all items in input"
_NO_PROMPTS = "prompts are not stored: send instructions and input"
_NO_COMPACTION = "the context is not compacted: shorten input"
_TEXT_FORMAT = 'use text={"format": {"type": "json_schema", "name": ..., "schema": ...}}'

# Refused by this API, in addition to what chat completions refuse.
OWN = {
    "conversation": Foreign(_SEND_ITEMS),
    "context": Foreign(_SEND_ITEMS),
    "session_params": Foreign(_SEND_ITEMS),
    "prompt": Foreign(_NO_PROMPTS),
    "messages": Foreign("use input"),
    "system": Foreign("use instructions", ("",)),
    "context_management": Foreign(_NO_COMPACTION, ([],)),
    "max_tokens": Foreign("use max_output_tokens"),
    "max_completion_tokens": Foreign("use max_output_tokens"),
    "response_format": Foreign(_TEXT_FORMAT, ({"type": "text"},)),
    "verbosity": Foreign('use text={"verbosity": ...}', ("medium",)),
    "reasoning_effort": Foreign('use reasoning={"effort": ...}'),
    "logprobs": Foreign('use include=["message.output_text.logprobs"]', (False,)),
    "continue_final_message": Foreign("an answer begins a new message", (False,)),
    "add_generation_prompt": Foreign("an answer begins a new message", (True,)),
    "echo": Foreign("an answer has no prompt", (False,)),
    "return_token_ids": Foreign("use /v1/chat/completions", (False,)),
    "return_tokens_as_token_ids": Foreign("use /v1/chat/completions", (False,)),
}
_ADVICE = {
    "use max_tokens": "use max_output_tokens",
    "max_tokens": "max_output_tokens limits an answer",
    "use response_format": _TEXT_FORMAT,
    "use reasoning_effort": 'use reasoning={"effort": ...}',
    "use logprobs": 'use include=["message.output_text.logprobs"]',
    "use prompt": "use input",
    "send the text in messages": "use input",
    "send it as a message": "use instructions",
}
FOREIGN = foreign_names(OWN, _ADVICE)
# OpenAI's fields without an influence on the answer, in addition to those of chat completions.
HARMLESS = frozenset(
    {"access_programs", "background_options", "image", "client_metadata", "stream_id"}
)
# By object: its known names, and the refused ones.
PLACES: Places = {
    "text": (frozenset({"format", "verbosity"}), {}),
    "text.format": (
        frozenset({"type", "name", "schema", "strict", "description"}),
        {"json_schema": Foreign("its fields belong into text.format itself")},
    ),
    "reasoning": (
        frozenset({"effort", "summary", "generate_summary"}),
        {
            "mode": Foreign("the model has one mode", ("standard",)),
            "context": Foreign(
                "the chat template decides which earlier reasoning is shown", ("auto",)
            ),
        },
    ),
    "tools": (
        frozenset({"type", "name", "description", "parameters", "strict", "defer_loading"}),
        {
            "function": Foreign("its fields belong into the tool itself"),
            "input_schema": Foreign("use parameters"),
            "async": Foreign("the client runs functions, in whatever way it likes", (False,)),
            "allowed_callers": Foreign("only the model itself calls functions", (["direct"],)),
            "output_schema": Foreign("the chat template does not show it", ({},)),
        },
    ),
    "input.message": (frozenset({"type", "id", "role", "content", "status", "phase"}), {}),
    "input.function_call": (
        frozenset({"type", "id", "call_id", "name", "arguments", "status", "caller", "async"}),
        {"namespace": Foreign("a function has one name")},
    ),
    "input.function_call_output": (
        frozenset({"type", "id", "call_id", "name", "output", "status", "caller"}),
        {"namespace": Foreign("a function has one name")},
    ),
    "input.reasoning": (
        frozenset({"type", "id", "summary", "content", "encrypted_content", "status"}),
        {},
    ),
    "input.content": (
        frozenset(
            {"type", "text", "annotations", "logprobs", "refusal", "prompt_cache_breakpoint"}
        ),
        {},
    ),
    "stream_options": (frozenset({"include_obfuscation", "include_usage"}), {}),
    "prompt_cache_options": (
        frozenset({"mode", "ttl", "comparison_response_id"}),
        {"prewarm": Foreign("an ordinary request fills the prefix cache", (False,))},
    ),
}
_MOST_PARTS = 64  # of one item that are looked at for unknown names


_check_place = partial(check_place, PLACES)


def check_responses_fields(body: ResponsesBody, unknown: UnknownNames, template: str = "") -> None:
    """Raise `ApiError` for a field of the request that is not supported."""
    known = body.passed_on() | HARMLESS | ResponsesBody.model_fields.keys()
    given = body.model_extra or {}
    check_names(given, "", known, FOREIGN, unknown)
    _check_place(body.text, "text", unknown)
    _check_place((body.text or {}).get("format"), "text.format", unknown)
    _check_place(body.reasoning, "reasoning", unknown)
    _check_place(body.stream_options, "stream_options", unknown)
    _check_place(given.get("prompt_cache_options"), "prompt_cache_options", unknown)
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type") == "function":
            _check_place(tool, "tools", unknown, path=f"tools[{number}]")

    for number, item in enumerate(body.input if isinstance(body.input, list) else ()):
        place = f"input.{item.get('type') or 'message'}"
        if place in PLACES:
            _check_place(item, place, unknown, path=f"input[{number}]")
        for name in ("content", "summary", "output"):
            parts = item.get(name)
            for part in parts[:_MOST_PARTS] if isinstance(parts, list) else ():
                _check_place(part, "input.content", unknown, path=f"input[{number}].{name}")
