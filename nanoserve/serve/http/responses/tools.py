"""Tools and `tool_choice` of the Responses API in the form of chat completions."""

from typing import Any

from nanoserve.serve.http.errors import ApiError

_NO_HOSTED = (
    "the server runs no tools: give the model a function, and run it in the client "
    '({"type": "function", "name": ..., "parameters": {...}})'
)
_NO_CUSTOM = (
    "calls have arguments by a schema: give the model a function with one string as its parameter"
)
_NO_NAMESPACE = "list its functions in tools"
_INSTEAD = {"custom": _NO_CUSTOM, "namespace": _NO_NAMESPACE}
_OF_A_FUNCTION = ("name", "description", "parameters", "strict")


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the functions of a request as chat completions have them.

    Raises `ApiError` that names a tool of another type, such as "web_search".
    """
    if tools is None:
        return None
    return [_chat_tool(tool, number) for number, tool in enumerate(tools)]


def _chat_tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        message = f"tools[{number}]: type={kind!r:.80} is not supported: "
        instead = _INSTEAD.get(kind, _NO_HOSTED) if isinstance(kind, str) else _NO_HOSTED
        raise ApiError(400, message + instead, f"tools[{number}].type", "unsupported")
    if not isinstance(tool.get("name"), str):
        message = f"tools[{number}] must be {{'type': 'function', 'name': ..., 'parameters': ...}}"
        raise ApiError(400, message, f"tools[{number}].name")
    function = {name: tool[name] for name in _OF_A_FUNCTION if tool.get(name) is not None}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a `tool_choice` as chat completions have it.

    Raises `ApiError` for one that names a tool that the server would have to run.
    """
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function" and isinstance(choice.get("name"), str):
        return _named(choice)
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        for tool in choice["tools"]:
            if not isinstance(tool, dict) or tool.get("type") != "function":
                message = f"tool_choice.tools: {tool!r:.80} is not a function: {_NO_HOSTED}"
                raise ApiError(400, message, "tool_choice", "unsupported")
        allowed = {"mode": choice.get("mode"), "tools": [_named(one) for one in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    message = (
        f"tool_choice={choice!r:.100} must be 'none', 'auto', 'required', {{'type': 'function', "
        "'name': ...} or {'type': 'allowed_tools', 'mode': ..., 'tools': [...]}"
    )
    raise ApiError(400, message, "tool_choice")


def _named(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name")}}
