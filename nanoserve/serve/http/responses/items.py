"""Items of the Responses API: the input in its complete form, and as messages of a chat."""

import base64
import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from nanoserve.serve.http.dialect import add_text
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.tools.blocks import is_no_object, object_so_far
from nanoserve.text.chat import text_of

_ROLES = ("user", "assistant", "system", "developer")
_STATUSES = ("in_progress", "completed", "incomplete")
_SEALED = "nanoserve:"  # begins the `encrypted_content` that this server writes
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
_KINDS = (*_PREFIXES, "item_reference")

# Returns the item that another response has, by its id; None if there is none.
FindItem = Callable[[str], dict[str, Any] | None]


def new_id(kind: str) -> str:
    """Return an id for an item of this type, or for a response."""
    return f"{_PREFIXES.get(kind, kind)}_{uuid4().hex}"


def normalized(given: str | list[dict[str, Any]] | None, find: FindItem) -> list[dict[str, Any]]:
    """Return the input as complete items, each with an id.

    find: finds the items that `item_reference`s name. Raises `ApiError` for an item that is not
    supported, or lacks something.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_normalized(item, f"input[{number}]", find) for number, item in enumerate(given)]


def _normalized(item: dict[str, Any], place: str, find: FindItem) -> dict[str, Any]:
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if kind not in _KINDS:
        message = f"{place}: type={kind!r:.80} is not supported; it must be one of {_KINDS}"
        raise ApiError(400, message, "input", "unsupported")
    if kind == "item_reference":
        found = find(_text(item, "id", place))
        if found is None:
            message = f"{place}: no stored response has an item with the id {item['id']!r:.100}"
            raise ApiError(400, message, "input", "item_not_found")
        return found
    own_id = item.get("id")
    complete: dict[str, Any] = {
        "id": own_id if isinstance(own_id, str) and own_id else new_id(kind)
    }
    complete |= {"type": kind} | _PARTS[kind](item, place)
    if kind != "reasoning":
        status = item.get("status")
        complete["status"] = status if status in _STATUSES else "completed"
    return complete


def _message(item: dict[str, Any], place: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise ApiError(400, f"{place}: role={role!r:.50} must be one of {_ROLES}", "input")
    text = _text_in(item.get("content"), f"{place}.content")
    part: dict[str, Any] = {"type": "input_text", "text": text}
    if role == "assistant":
        part = {"type": "output_text", "text": text, "annotations": []}
    return {"role": role, "content": [part]}


def _function_call(item: dict[str, Any], place: str) -> dict[str, Any]:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise ApiError(400, f"{place}: arguments must be a string of JSON", "input")
    names = {"call_id": _text(item, "call_id", place), "name": _text(item, "name", place)}
    return names | {"arguments": arguments}


def _function_call_output(item: dict[str, Any], place: str) -> dict[str, Any]:
    output = _text_in(item.get("output"), f"{place}.output")
    return {"call_id": _text(item, "call_id", place), "output": output}


def _reasoning(item: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the parts of reasoning; that of other servers may be encrypted, and stays so."""
    parts = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = item.get(name) or []
        is_list = isinstance(texts, list) and all(isinstance(one, dict) for one in texts)
        if not is_list or not all(isinstance(one.get("text"), str) for one in texts):
            message = f"{place}: {name} must be a list of {{'type': {kind!r}, 'text': ...}}"
            raise ApiError(400, message, "input")
        parts[name] = [{"type": kind, "text": one["text"]} for one in texts]
    sealed = item.get("encrypted_content")
    if not parts["content"] and isinstance(sealed, str):
        parts["content"] = [{"type": "reasoning_text", "text": one} for one in _unsealed(sealed)]
    return parts


_PARTS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def sealed(reasoning: str) -> str:
    """Return reasoning in base64, which clients keep as `encrypted_content`.

    Some clients send nothing else of it back. It is not encrypted: nothing of it is secret.
    """
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _unsealed(sealed: str) -> list[str]:
    """Return the text of `sealed` in a list; an empty list for that of another server."""
    if not sealed.startswith(_SEALED):
        return []
    try:
        return [base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()]
    except ValueError:
        return []


def messages_of(items: list[dict[str, Any]], instructions: str = "") -> list[dict[str, Any]]:
    """Return the instructions, if any, and the items as messages of a chat.

    The reasoning, the text and the calls of one answer are several items, and one message. Raises
    `ApiError` for the output of a call that is not there.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        add_text(messages, "system", instructions)
    call_ids: set[str] = set()
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            if item["call_id"] not in call_ids:
                message = f"input: no function_call has the call_id {item['call_id']!r:.100}"
                raise ApiError(400, f"{message}, of which it has the output", "input")
            answer = {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
            messages.append(answer)
        elif kind == "reasoning" and not _reasoning_of(item):
            continue  # another server has encrypted it
        elif kind == "message" and item["role"] != "assistant":
            role = "system" if item["role"] == "developer" else item["role"]
            add_text(messages, role, _content(item))
        else:
            if not messages or not _continues(messages[-1], item):
                messages.append({"role": "assistant", "content": ""})
            _add_to(messages[-1], item)
        if kind == "function_call":
            call_ids.add(item["call_id"])
    return messages


def _continues(message: dict[str, Any], item: dict[str, Any]) -> bool:
    """Return True if an item belongs to the answer of which `message` has the parts before it."""
    if message["role"] != "assistant":
        return False
    if "tool_calls" in message or not message["content"]:
        return True
    return item["type"] == "function_call"


def _add_to(message: dict[str, Any], item: dict[str, Any]) -> None:
    if item["type"] == "function_call":
        function = {"name": item["name"], "arguments": _arguments(item)}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
        return
    is_reasoning = item["type"] == "reasoning"
    name = "reasoning" if is_reasoning else "content"
    text = _reasoning_of(item) if is_reasoning else _content(item)
    message[name] = "\n".join(filter(None, [message.get(name), text]))


def _arguments(item: dict[str, Any]) -> Any:
    """Return the arguments of a call; if it was cut off, those that it has."""
    text = item["arguments"]
    if item["status"] == "incomplete" or (is_no_object(text) and _is_json(text)):
        return json.dumps(object_so_far(text))
    return text  # the template's form of it is made, and checked, later


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _reasoning_of(item: dict[str, Any]) -> str:
    return "\n".join(part["text"] for part in item["content"] or item["summary"])


def _content(item: dict[str, Any]) -> str:
    return "\n".join(part["text"] for part in item["content"])


def _text(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{place}: {name}={value!r:.80} must be a string", "input")
    return value


def _text_in(content: Any, place: str) -> str:
    if content is None:
        raise ApiError(400, f"{place} must be a string or a list of text parts", "input")
    try:
        return text_of(content)
    except ValueError as error:
        message = str(error).removeprefix("messages: ")
        raise ApiError(400, f"{place}: {message}", "input", "unsupported") from error
