"""Parses the arguments of tool calls: templates expect objects, but clients send JSON strings."""

import json
from collections.abc import Mapping
from typing import Any

from nanoserve.utils.checks import require, shown


def arguments_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call's `function` as an object; None, "" and "null" are empty.

    OpenAI clients keep them as the JSON string that they have received. Raises `ValueError` for
    anything that is not an object.
    """
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments.strip())
    if arguments is None:
        return {}
    name = shown(function.get("name"))
    is_object = isinstance(arguments, Mapping)
    require(is_object, f"messages: the arguments of {name} must be a JSON object")
    return arguments


def _parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text


def with_objects(message: Any) -> Any:
    """Return the message with the arguments of each function call as an object."""
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
    """Return True if a call's arguments are text or missing; other forms are for the template."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return False
    return isinstance(function.get("arguments"), str | None)
