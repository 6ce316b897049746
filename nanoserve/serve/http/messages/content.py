"""Content blocks of the Messages API as messages of a chat."""

from typing import Any

from nanoserve.serve.http.dialect import add_text
from nanoserve.serve.http.errors import ApiError

_TEXT_ONLY = "this model reads only text"
_NO_SERVER_TOOLS = "the server runs no tools"
_INSTEAD = {
    "image": _TEXT_ONLY,
    "document": f"{_TEXT_ONLY}: send the text of a document in a text block",
    "search_result": "send its text in a text block",
    "container_upload": _TEXT_ONLY,
}
# Types of blocks by the roles whose messages may have them.
_KNOWN = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# Fields that are strings, by the type of a block.
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}


def system_text(system: str | list[dict[str, Any]] | None) -> str:
    """Return the text of the field `system`; "" if there is none."""
    if system is None or isinstance(system, str):
        return system or ""
    blocks = [_checked(block, "system", f"system.{i}") for i, block in enumerate(system)]
    return "\n".join(block["text"] for block in blocks)


def messages_of(
    given: list[dict[str, Any]], system: str | list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Return the messages of a request as those of a chat.

    Results of tools become messages of their own. Adjacent messages of a user are one message, as
    in the original API. Raises `ApiError` for a block that is not supported, and for a result of a
    call that is not there.

    system: the field of this name, which comes first.
    """
    messages: list[dict[str, Any]] = []
    if text := system_text(system):
        add_text(messages, "system", text)
    call_ids: set[str] = set()
    for number, message in enumerate(given):
        place, role = f"messages.{number}", message.get("role")
        if not isinstance(role, str) or role not in _KNOWN:
            text = f"{place}: role={role!r:.50} must be one of {tuple(_KNOWN)}"
            raise ApiError(400, text, "messages")
        blocks = _blocks(message.get("content"), role, f"{place}.content")
        if role == "assistant":
            messages.append(_assistant(blocks))
            call_ids |= {block["id"] for block in blocks if block["type"] == "tool_use"}
            continue
        for index, block in enumerate(blocks):
            if block["type"] == "tool_result":
                messages.append(_result(block, call_ids, f"{place}.content.{index}"))
            else:
                add_text(messages, role, block["text"])
        if not blocks:
            add_text(messages, role, "")
    return messages


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant"}
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    message["content"] = "\n".join(filter(None, texts))
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    if any(thoughts):
        message["reasoning"] = "\n".join(filter(None, thoughts))
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": block["input"]},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _result(block: dict[str, Any], call_ids: set[str], place: str) -> dict[str, Any]:
    call_id = block["tool_use_id"]
    if call_id not in call_ids:
        message = f"{place}: no tool_use before it has the id {call_id!r:.100}"
        raise ApiError(400, message, "messages")
    content = block.get("content")
    inner = _blocks("" if content is None else content, "system", f"{place}.content")
    text = "\n".join(part["text"] for part in inner)
    result: dict[str, Any] = {"role": "tool", "tool_call_id": call_id, "content": text}
    return result | ({"is_error": True} if block.get("is_error") else {})


def _blocks(content: Any, role: str, place: str) -> list[dict[str, Any]]:
    """Return a content as blocks, each with what its type needs."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{place} must be a string or a list of blocks", "messages")
    return [_checked(block, role, f"{place}.{index}") for index, block in enumerate(content)]


def _checked(block: Any, role: str, place: str) -> dict[str, Any]:
    param = place.partition(".")[0]
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in _KNOWN[role]:
        instead = _INSTEAD.get(kind) if isinstance(kind, str) else None
        if instead is None and isinstance(kind, str) and kind.startswith("server_tool"):
            instead = _NO_SERVER_TOOLS
        instead = instead or f"it must be one of {_KNOWN[role]}"
        message = f"{place}: a block of type {kind!r:.80} is not supported: {instead}"
        raise ApiError(400, message, param, "unsupported")
    for name in _NEEDED[kind]:
        if not isinstance(block.get(name), str):
            message = f"{place}: {name} must be a string, as a block of type {kind!r} has it"
            raise ApiError(400, message, param)
    if kind == "tool_use" and not isinstance(block.get("input"), dict):
        raise ApiError(400, f"{place}: input must be an object", param)
    return block
