"""Arguments of tool calls in messages: templates get objects, and clients keep them as texts."""

import json
from collections.abc import Mapping
from typing import Any

from nanoserve.utils.checks import require, shown


def arguments_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call's `function` as an object; nothing, "" and "null" are no arguments.

    OpenAI's clients keep them as the text that they have got. Raises `ValueError` for what is no
    object.
    """
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments.strip())
    if arguments is None:
        return {}
    told = f"messages: the arguments of {shown(function.get('name'))} are no JSON object"
    require(isinstance(arguments, Mapping), told)
    return arguments


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text


def with_objects(message: Any) -> Any:
    """Return a message in which each call of a function in OpenAI's form has an object."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, (list, tuple)) or not any(map(_is_text_in, calls)):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    if not _is_text_in(call):
        return call
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_of(function)}}


def _is_text_in(call: Any) -> bool:
    """Tell whether a call's arguments are text, or nothing. Other forms are the template's own."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return False
    return isinstance(function.get("arguments"), str | None)
