"""The calls of Mistral: behind `[TOOL_CALLS]`, as a list, or by name."""

import re

from nanoserve.server.tools.json_so_far import end_of_value, read_object, skip_space
from nanoserve.server.tools.parsed import (
    Text,
    ToolCall,
    call_of,
    without_beginning_of,
)

TAG, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_NAME = re.compile(r"[\w.-]+")


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """(content, calls). Older models write a list of objects; newer ones a tag, a name and the
    arguments for each call."""
    content, calls, at = Text(), [], 0
    while True:
        begin = text.find(TAG, at)
        if begin < 0:
            rest = text[at:]
            content.add(rest if is_final else without_beginning_of(rest, (TAG,)))
            break
        content.add(text[at:begin])
        first = skip_space(text, begin + len(TAG))
        read = _read_list if text[first : first + 1] == "[" else _read_named
        some, end = read(text, first)
        if some:
            content.end_piece()
            calls += some
        if end is not None and some:
            at = end
            continue
        is_bad = end is not None
        if not some and (is_bad or is_final):  # it is nothing that anybody knows
            content.add(text[begin : begin + len(TAG)])
            at = begin + len(TAG)
            continue
        break
    return content.joined(is_final), calls


# Both return the calls that begin at `at`, and where they end: None if more may come of them.


def _read_list(text: str, at: int) -> tuple[list[ToolCall], int | None]:
    calls: list[ToolCall] = []
    at = skip_space(text, at + 1)
    while at < len(text):
        found = read_object(text, at)
        call = call_of(text, found)
        if call is not None:
            calls.append(call)
        if found.is_bad:
            return calls, at if call is None else None
        if found.end is None:
            return calls, None
        at = skip_space(text, found.end)
        if text[at : at + 1] == "]":
            return calls, at + 1
        if text[at : at + 1] not in (",", ""):
            return calls, at
        at = skip_space(text, at + 1)
    return calls, None


def _read_named(text: str, at: int) -> tuple[list[ToolCall], int | None]:
    found = _NAME.match(text, at)
    if found is None:
        return [], None if at == len(text) else at
    begin = skip_space(text, found.end())
    if text.startswith(ARGUMENTS, begin):
        begin = skip_space(text, begin + len(ARGUMENTS))
    rest = text[begin:]
    if not rest.startswith("{"):
        return [], None if ARGUMENTS.startswith(rest) else begin
    end = end_of_value(text, begin)
    return [ToolCall(found[0], text[begin:end], end is not None)], end
