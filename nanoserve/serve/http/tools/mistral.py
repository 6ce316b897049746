"""A parser for the calls of Mistral, a list of objects or named calls after `[TOOL_CALLS]`."""

import re
from collections.abc import Callable

from nanoserve.serve.http.tools.parse_result import (
    Text,
    ToolCall,
    call_of,
    without_beginning_of,
)
from nanoserve.serve.http.tools.partial_json import read_object, read_value, skip_space

TAG, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[\w./-]+")
_CALL_ID = re.compile(r"\[CALL_ID\][\w-]*")
# Called with a text, a position and whether the text is complete: returns the calls that begin
# there, and the position after them, which is None if they may continue.
ReadCalls = Callable[[str, int, bool], tuple[list[ToolCall], int | None]]


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """Return (content, calls).

    Older models write a list of objects. Newer models write a tag, a name and arguments per call.
    Text after a tag that is neither is content.
    """
    return parse_after_tags(text, is_final, (TAG,), _read_calls)


def parse_after_tags(
    text: str, is_final: bool, tags: tuple[str, ...], read: ReadCalls
) -> tuple[str, list[ToolCall]]:
    """Return (content, calls); `read` reads the calls after each of the tags."""
    content, calls, at = Text(), [], 0
    while True:
        found = [(i, tag) for tag in tags if (i := text.find(tag, at)) >= 0]
        if not found:
            rest = text[at:]
            content.add(rest if is_final else without_beginning_of(rest, tags))
            break
        begin, tag = min(found)
        content.add(text[at:begin])
        some, end = read(text, skip_space(text, begin + len(tag)), is_final)
        if some:
            content.end_piece()
            calls += some
        if end is None:  # the calls may continue
            if not some and is_final:
                content.add(text[begin:])
            break
        if not some:
            content.add(tag)
            end = begin + len(tag)
        at = end
    return content.joined(is_final), calls


def _read_calls(text: str, at: int, is_final: bool) -> tuple[list[ToolCall], int | None]:
    read = read_objects if text[at : at + 1] in ("[", "{") else _read_named
    return read(text, at, is_final)


def read_objects(text: str, at: int, is_final: bool) -> tuple[list[ToolCall], int | None]:
    calls: list[ToolCall] = []
    is_list = text[at] == "["
    at = skip_space(text, at + is_list)
    while at < len(text):
        found = read_object(text, at)
        call = call_of(text, found)
        if call is not None:
            calls.append(call)
        if found.stop is not None:
            return calls, at if call is None else found.stop
        if found.end is None or call is None:
            is_lost = call is None and (is_final or found.end is not None)
            return calls, at if is_lost and calls else (None if found.end is None else at)
        at = skip_space(text, found.end)
        if not is_list:
            return calls, at
        if text[at : at + 1] == "]":
            return calls, at + 1
        if text[at : at + 1] not in (",", ""):
            return calls, at
        at = skip_space(text, at + 1)
    return calls, None


def _read_named(text: str, at: int, is_final: bool) -> tuple[list[ToolCall], int | None]:
    found = _NAME.match(text, at)
    if found is None:
        return [], None if at == len(text) else at
    begin = skip_space(text, found.end())
    own_id = _CALL_ID.match(text, begin)
    if own_id is not None:
        begin = own_id.end()
    if text.startswith(ARGUMENTS, begin):
        begin = skip_space(text, begin + len(ARGUMENTS))
    rest = text[begin:]
    if not rest.startswith("{"):
        may_come = ARGUMENTS.startswith(rest) or "[CALL_ID]".startswith(rest)
        return [], None if may_come else begin
    value = read_value(text, begin)
    end = value.stop if value.end is None else value.end
    return [ToolCall(found[0], text[begin:end], value.end is not None)], end
