"""The tools of a request, and whether the model must call one."""

import re
from dataclasses import dataclass
from typing import Any

from nanoserve.serve.http.body_cost import BodyCost
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.tools.parsers import ToolFormat
from nanoserve.text.tool_arguments import arguments_of

_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MOST_TOOLS = 512
_MOST_ARGUMENTS = 2**18  # cost of all calls in a conversation, in units of `BodyCost`
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Function:
    """A function that a model may call.

    parameters: a JSON schema of its arguments. number: its index in `tools`.
    """

    name: str
    parameters: dict[str, Any]
    is_strict: bool
    number: int = 0

    @property
    def field(self) -> str:
        """The path of `parameters` in the request, for error messages."""
        return f"tools[{self.number}].function.parameters"


@dataclass(frozen=True)
class ToolUse:
    """The functions that a response may call, and the format of calls.

    must_call: True if a call is required. is_named: True if the client has named the function.
    allows_several: True if a response may contain several calls. is_limited: True if the template
    shows other functions, which may not be called. is_either: True if a response is calls or
    content with a format of its own, never both.
    """

    format: ToolFormat
    functions: list[Function]
    must_call: bool
    is_named: bool
    allows_several: bool
    is_limited: bool = False
    is_either: bool = False

    @property
    def call_starts(self) -> tuple[str, ...]:
        """The texts of which an output begins with one if it has calls and `is_either`.

        There are none if a header before the content distinguishes it from a call.
        """
        if self.format.reasoning_parser is not None:
            return ()
        if self.format.starts:
            return self.format.starts
        begins = (self.format.call_begin(function.name) for function in self.functions)
        return tuple(self.format.before + begin for begin in begins)


def tool_use_of(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    allows_several: bool | None,
    format: ToolFormat,
    is_shown: bool,
) -> ToolUse | None:
    """Return the tool use of a request; None if nothing may be called.

    is_shown: True if the chat template shows tools to the model. Otherwise a model can only be
    forced to call a tool. Raises `ApiError` for invalid tools or an invalid choice.
    """
    functions = [_function_of(tool, number) for number, tool in enumerate(tools or [])]
    names = [function.name for function in functions]
    if len(names) > _MOST_TOOLS:
        message = f"tools has {len(names)} entries; at most {_MOST_TOOLS} are allowed"
        raise ApiError(400, message, "tools")
    for name in names:
        if names.count(name) > 1:
            raise ApiError(400, f"tools has two functions named {name!r}", "tools")
    wanted, mode = _wanted(choice)
    for name in wanted or ():
        if name not in names:
            message = f"tool_choice names {name!r:.64}, which is not one of the tools: {names}"
            raise ApiError(400, message, "tool_choice")
    if not functions or mode == "none":
        if mode == "required":
            raise ApiError(400, "tool_choice='required' needs tools to choose from", "tool_choice")
        return None
    must_call, is_named = mode in ("required", "named"), mode == "named"
    if not must_call and not is_shown:
        message = (
            "tools: the chat template of this model does not support tools, or its format of calls "
            "is unknown (--tool-call-parser of the server). tool_choice can force a call"
        )
        raise ApiError(400, message, "tools", "unsupported")
    allowed = [one for one in functions if wanted is None or one.name in wanted]
    for one in allowed:
        _check_name(one, format)
    several, is_limited = allows_several is not False and not is_named, len(allowed) < len(names)
    format = format.for_functions({one.name: one.parameters for one in allowed})
    return ToolUse(format, allowed, must_call, is_named, several, is_limited)


def check_arguments(messages: list[dict[str, Any]]) -> None:
    """Raise `ApiError` if the arguments of all calls together have too many items to be parsed."""
    total = 0
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                total += BodyCost.of(arguments)
    if total > _MOST_ARGUMENTS:
        problem = "messages: the arguments of tool calls have too many items: a number counts 1, a "
        problem += "string 2, a name 4, a list or an object 16; the sum may be at most "
        raise ApiError(400, f"{problem}{_MOST_ARGUMENTS}", "messages")


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as objects, which templates expect.

    OpenAI's clients send them as strings of JSON. Raises `ApiError` for invalid calls.
    """
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ApiError(400, "messages: tool_calls must be a list of objects", "messages")
    parsed = []
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, "messages: a tool call needs a function with a name", "messages")
        try:
            arguments = arguments_of(function)
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from error
        parsed.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": parsed}


def with_all_names_of_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under all names, since a template uses one of them.

    The template of gpt-oss rejects a message with `thinking` and with content.
    """
    names = ["reasoning", "reasoning_content"]
    names += [] if message.get("content") else ["thinking"]
    given = [message[name] for name in names if message.get(name) is not None]
    missing = [name for name in names if message.get(name) is None]
    return message | dict.fromkeys(missing, given[0]) if given and missing else message


def _function_of(tool: dict[str, Any], number: int) -> Function:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        message = f"tools[{number}] must be {{'type': 'function', 'function': {{...}}}}"
        raise ApiError(400, message, "tools", "unsupported")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"tools[{number}]: name={name!r:.80} must be 1 to 128 of a-z, A-Z, 0-9, _ and -"
        raise ApiError(400, message, "tools")
    if parameters is not None and not isinstance(parameters, dict):
        field = f"tools[{number}].function.parameters"
        raise ApiError(400, f"{field} must be a JSON schema", field)
    is_strict = function.get("strict") is True
    return Function(name, parameters or _NO_ARGUMENTS, is_strict, number)


def _check_name(function: Function, format: ToolFormat) -> None:
    """Raise `ApiError` for a name that is not recognized in a call of this format."""
    if format.names is None or format.names.fullmatch(function.name) is not None:
        return
    field = f"tools[{function.number}].function.name"
    message = f"{field}={function.name!r} cannot be called in the format {format.name!r} of this "
    message += "model, in which a name begins with a letter or _; rename the function"
    raise ApiError(400, message, field, "unsupported")


def _wanted(choice: str | dict[str, Any] | None) -> tuple[list[str] | None, str]:
    """Return (names of the functions that may be called, mode) of a `tool_choice`.

    The names are None if all may be called. The mode is one of `_CHOICES`, or "named".
    """
    if choice is None or isinstance(choice, str):
        if choice is not None and choice not in _CHOICES:
            message = f"tool_choice={choice!r:.100} must be one of {_CHOICES}, or name a function"
            raise ApiError(400, message, "tool_choice")
        return None, choice or "auto"
    if choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    name = _name_in(choice)
    if name is None:
        message = "tool_choice must be {'type': 'function', 'function': {'name': '...'}}, or "
        raise ApiError(400, f"{message}have the type 'allowed_tools'", "tool_choice")
    return [name], "named"


def _allowed(given: Any) -> tuple[list[str], str]:
    """Return the names and the mode of OpenAI's `allowed_tools`."""
    given = given if isinstance(given, dict) else {}
    mode, tools = given.get("mode"), given.get("tools")
    names = [_name_in(tool) for tool in tools] if isinstance(tools, list) else []
    known = [name for name in names if name is not None]
    if mode not in _CHOICES[1:] or not known or len(known) < len(names):
        message = (
            "tool_choice.allowed_tools must be {'mode': 'auto' or 'required', 'tools': [{'type': "
            "'function', 'function': {'name': '...'}}, ...]}, with at least one tool"
        )
        raise ApiError(400, message, "tool_choice")
    return known, mode


def _name_in(tool: Any) -> str | None:
    """Return the name in {"type": "function", "function": {"name": ...}}; None if it is not so."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    is_function = isinstance(name, str) and tool.get("type") == "function"
    return name if is_function else None
