"""Handle request fields that nanoserve does not have.

No field that would change the output is ignored silently. Known fields of other servers are
rejected with a hint on what to use instead, unless their value has no effect. Known fields that do
not influence the output are ignored. Unknown fields, which may be typos, are ignored and logged
once. `nanoserve.compat.request_names` lists all known names.
"""

import logging
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from nanoserve.compat.request_names import FOREIGN, HARMLESS, PLACES, Foreign, has_no_effect
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import (
    THINKING_SWITCHES,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    looks_at,
    looks_into,
)

logger = logging.getLogger(__name__)

# By object of a request: its known names, and the refused ones.
Places = Mapping[str, tuple[frozenset[str], dict[str, Foreign]]]

_MOST_LOGGED = 200  # names, each once
_LONGEST_LOGGED = 64  # characters of a name
_MOST_LOOKED_AT = 64  # unknown names checked per object, and objects per list
_NOT_LOOKED_AT = "the chat template does not use it"
_CHAT = "it is a field of /v1/chat/completions"
# Fields that only the other endpoint supports.
_ELSEWHERE: dict[type[Body], dict[str, Foreign]] = {
    CompletionBody: {
        "messages": Foreign("use prompt, or /v1/chat/completions"),
        "max_completion_tokens": Foreign("use max_tokens"),
        "top_logprobs": Foreign("use logprobs, which is a number here", (0,)),
        "tools": Foreign("use /v1/chat/completions", ([],)),
        "tool_choice": Foreign("use /v1/chat/completions", ("none", "auto")),
        "parallel_tool_calls": Foreign(_CHAT, (True, False)),
        "reasoning_effort": Foreign(_CHAT),
        "thinking_token_budget": Foreign(_CHAT, (-1,)),
        "verbosity": Foreign(_CHAT, ("medium",)),
        "chat_template": Foreign(_CHAT),
        "chat_template_kwargs": Foreign(_CHAT, ({},)),
        "documents": Foreign(_CHAT, ([],)),
        "add_generation_prompt": Foreign(_CHAT, (True,)),
        "continue_final_message": Foreign(_CHAT, (False,)),
        "allow_special_tokens": Foreign("special tokens in a prompt are always parsed", (True,)),
    },
    ChatBody: {"add_special_tokens": Foreign("the chat template adds them", (False,))},
}


_FOREIGN_OF: dict[type[Body], dict[str, Foreign]] = {
    **{kind: FOREIGN | _ELSEWHERE.get(kind, {}) for kind in (CompletionBody, ChatBody)},
    TokenizeBody: FOREIGN,
    DetokenizeBody: {},
}


class UnknownNames:
    """Logs unknown field names, each once. Nothing else of a request is kept or logged."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, place: str, name: str, known: Iterable[str], reason: str = "") -> None:
        """Log that `name` in the object `place` was ignored; "" is the request itself."""
        key = place, name[:_LONGEST_LOGGED]
        if key in self._logged or len(self._logged) >= _MOST_LOGGED:
            return
        self._logged.add(key)
        near = get_close_matches(key[1], sorted(known), n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]}?" if near else ""
        where = f"{place}: " if place else ""
        reason = reason or "unknown field"
        logger.warning("%signored %r: %s%s", where, key[1], reason, hint)
        if len(self._logged) == _MOST_LOGGED:
            logger.warning("ignored %s unknown fields: further ones are not logged", _MOST_LOGGED)


def check_fields(body: Body, unknown: UnknownNames, template: str = "") -> None:
    """Raise `ApiError` for an unsupported field that would change the output.

    template: the source of the chat template, which may use any member of a message.
    """
    kind, given = type(body), body.model_extra or {}
    foreign = _FOREIGN_OF[kind]
    if "best_of" in given and isinstance(body, GenerationBody):
        best_of = foreign["best_of"]
        foreign = foreign | {"best_of": best_of._replace(neutral=(*best_of.neutral, body.n))}
    check_names(given, "", kind.model_fields, foreign, unknown)
    if isinstance(body, TokenizeBody):
        check_tokenize_fields(body, unknown)
    if isinstance(body, GenerationBody):
        _check_request_id(body)
        _check_formats(body, unknown)
    if isinstance(body, ChatBody):
        _check_chat(body, unknown, template)


def check_names(
    given: Mapping[str, Any],
    place: str,
    known: Iterable[str],
    foreign: Mapping[str, Foreign],
    unknown: UnknownNames,
    template: str = "",
    path: str = "",
) -> None:
    """Check the names in one object. `path`: the name of the object in error messages."""
    num_unknown, path = 0, path or place
    for name, value in given.items():
        if value is None or name in known or (name in HARMLESS and not place):
            continue
        if template and looks_into(template, name):
            continue
        if name in foreign:
            if not has_no_effect(value, foreign[name].neutral):
                full = f"{path}.{name}" if path else name
                message = f"{full} is not supported: {foreign[name].instead}"
                raise ApiError(400, message, full, "unsupported")
        elif num_unknown < _MOST_LOOKED_AT:
            num_unknown += 1
            unknown.note(place, name, known)


def check_place(
    places: Places,
    given: Any,
    place: str,
    unknown: UnknownNames,
    template: str = "",
    path: str = "",
) -> None:
    """Check the names in `given`, if it is an object. `place`: its key in `places`."""
    if isinstance(given, Mapping):
        known, foreign = places[place]
        check_names(given, place, known, foreign, unknown, template, path)


_check_place = partial(check_place, PLACES)


def _check_formats(body: GenerationBody, unknown: UnknownNames) -> None:
    _check_place(body.response_format, "response_format", unknown)
    if body.response_format is not None:
        described = body.response_format.get("json_schema")
        _check_place(described, "response_format.json_schema", unknown)
    if body.stream_options is not None:
        _check_place(body.stream_options.model_extra, "stream_options", unknown)


def _check_chat(body: ChatBody, unknown: UnknownNames, template: str) -> None:
    for message in body.messages or ():
        _check_place(message, "messages", unknown, template)
        parts = message.get("content")
        for part in parts[:_MOST_LOOKED_AT] if isinstance(parts, list) else ():
            if isinstance(part, Mapping) and part.get("type") in (None, "text"):
                _check_place(part, "messages.content", unknown, template)
        calls = message.get("tool_calls")
        for call in calls[:_MOST_LOOKED_AT] if isinstance(calls, list) else ():
            _check_place(call, "messages.tool_calls", unknown, template)
            function = call.get("function") if isinstance(call, Mapping) else None
            _check_place(function, "messages.tool_calls.function", unknown, template)
    for number, tool in enumerate(body.tools or ()):
        _check_place(tool, "tools", unknown, template)
        function = tool.get("function")
        _check_place(function, "tools.function", unknown, template, f"tools[{number}].function")
    _check_place(body.tool_choice, "tool_choice", unknown)
    if isinstance(body.tool_choice, Mapping):
        _check_place(body.tool_choice.get("allowed_tools"), "tool_choice.allowed_tools", unknown)
    variables = {*THINKING_SWITCHES, "reasoning_effort", "documents"}
    for name in list(body.chat_template_kwargs or ())[:_MOST_LOOKED_AT]:
        if not looks_at(template, name):
            seen = {variable for variable in variables if looks_at(template, variable)}
            unknown.note("chat_template_kwargs", name, seen, _NOT_LOOKED_AT)
    for name in ("reasoning_effort", "verbosity"):
        if getattr(body, name) is not None and not body.hints(template):
            unknown.note("", name, (), _NOT_LOOKED_AT)


def _check_request_id(body: GenerationBody) -> None:
    own = body.request_id
    if own is not None and not (0 < len(own) <= 128 and own.isascii() and own.isprintable()):
        message = "request_id must be 1 to 128 printable ASCII characters"
        raise ApiError(400, message, "request_id")


# Fields of a generation that ask for something that /tokenize does not return, with the values that
# ask for nothing.
_NOT_RETURNED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
}
# Fields that /tokenize reads, in addition to those of a conversation.
_READ = {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"}
_OF_CONVERSATIONS = {
    *("tools", "tool_choice", "reasoning_effort", "verbosity", "chat_template_kwargs"),
    *("documents", "add_generation_prompt", "continue_final_message", "allow_special_tokens"),
}


def check_tokenize_fields(body: TokenizeBody, unknown: UnknownNames) -> None:
    """Raise `ApiError` for fields of /tokenize that ask for something that it does not do.

    A body may be one of /v1/chat/completions, whose other fields are ignored and logged once.
    """
    with_prompt, with_messages = _ELSEWHERE[CompletionBody], _ELSEWHERE[ChatBody]
    for name in sorted(body.model_fields_set & TokenizeBody.model_fields.keys()):
        value, refusal = getattr(body, name), ""
        if name in _NOT_RETURNED:
            if not has_no_effect(value, _NOT_RETURNED[name]):
                refusal = "only tokens are returned; remove it"
        elif name in _OF_CONVERSATIONS:
            is_unused = body.prompt is not None
            if is_unused and not has_no_effect(value, with_prompt[name].neutral):
                refusal = "a prompt is tokenized as it is; pass messages instead"
        elif name in with_messages:
            is_unused = body.messages is not None
            if is_unused and not has_no_effect(value, with_messages[name].neutral):
                refusal = f"{with_messages[name].instead}; remove it, or pass prompt"
        elif name not in _READ and value is not None:
            unknown.note("", name, (), "/tokenize generates nothing")
        if refusal:
            raise ApiError(400, f"{name} is not supported here: {refusal}", name, "unsupported")
