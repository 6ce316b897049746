"""The calls of Qwen and Hermes: JSON between `<tool_call>` and `</tool_call>`."""

from nanoserve.serve.http.tools.parse_result import Text, ToolCall, call_of, without_beginning_of
from nanoserve.serve.http.tools.partial_json import read_object

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """(content, calls). What stands in the tags and is no call is content, as it is.

    The end of a call is found by its JSON, so an argument may hold a tag. A call that breaks off,
    or turns out to be no JSON when its name was told, stays an incomplete one, and content goes on
    where it ceased to be JSON.
    """
    content, calls, at = Text(), [], 0
    while True:
        begin = text.find(_OPEN, at)
        if begin < 0:
            rest = text[at:]
            content.add(rest if is_final else without_beginning_of(rest, (_OPEN,)))
            break
        content.add(text[at:begin])
        found = read_object(text, begin + len(_OPEN))
        call = call_of(text, found)
        ended_at = found.stop if found.end is None else found.end
        if call is None and ended_at is not None:  # what stands there may yet hold a call
            content.add(_OPEN)
            at = begin + len(_OPEN)
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
    """Behind the closing tag; `at` itself if there is none, None if it may come.

    Models close a brace too many before it.
    """
    behind = at
    while behind < len(text) and text[behind] in "}] \t\n\r":
        behind += 1
    if text.startswith(_CLOSE, behind):
        return behind + len(_CLOSE)
    return None if _CLOSE.startswith(text[behind:]) else at
