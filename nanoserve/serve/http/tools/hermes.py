"""A parser for the calls of Qwen and Hermes, JSON between `<tool_call>` and `</tool_call>`."""

from nanoserve.serve.http.tools.parse_result import Text, ToolCall, call_of, without_beginning_of
from nanoserve.serve.http.tools.partial_json import read_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """Return (content, calls). Text between the tags that is not a call is content, unchanged.

    The end of a call is found by parsing its JSON, so an argument may contain a tag. A call that
    breaks off, or proves to be invalid JSON after its name was sent, stays incomplete, and content
    continues where the text stops being JSON.
    """
    content, calls, at = Text(), [], 0
    while True:
        begin = text.find(OPEN, at)
        if begin < 0:
            rest = text[at:]
            content.add(rest if is_final else without_beginning_of(rest, (OPEN,)))
            break
        content.add(text[at:begin])
        found = read_object(text, begin + len(OPEN))
        call = call_of(text, found)
        ended_at = found.stop if found.end is None else found.end
        if call is None and ended_at is not None:  # the text after the tag may contain a call
            content.add(OPEN)
            at = begin + len(OPEN)
            continue
        if call is None:
            content.add(text[begin:] if is_final else "")
            break
        content.end_piece()
        calls.append(call)
        if ended_at is None:
            break
        at = ended_at
        closed = _behind_close(text, at)
        if closed is None:
            break
        at = closed
    return content.joined(is_final), calls


def _behind_close(text: str, at: int) -> int | None:
    """Return the position after the closing tag; `at` if there is none, None if it may follow.

    Models sometimes write a surplus closing brace before the tag, which is skipped.
    """
    behind = at
    while behind < len(text) and text[behind] in "}] \t\n\r":
        behind += 1
    if text.startswith(CLOSE, behind):
        return behind + len(CLOSE)
    return None if CLOSE.startswith(text[behind:]) else at
