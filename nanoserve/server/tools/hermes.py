"""The calls of Qwen and Hermes: JSON between `<tool_call>` and `</tool_call>`."""

from nanoserve.server.tools.json_so_far import read_object, skip_space
from nanoserve.server.tools.parsed import Text, ToolCall, call_of, without_beginning_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """(content, calls). What stands in the tags and is no call is content, as it is.

    The end of a call is found by its JSON, so an argument may hold a tag. A call that breaks off,
    or turns out to be no JSON when its name was told, stays an incomplete one.
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
        if call is not None:
            content.end_piece()
            calls.append(call)
        if found.end is not None and call is not None:
            at = skip_space(text, found.end)
            if text.startswith(_CLOSE, at):
                at += len(_CLOSE)
            elif _CLOSE.startswith(text[at:]):
                break  # it is about to be closed
            continue
        end = text.find(_CLOSE, begin)
        if (found.is_bad or found.end is not None) and end >= 0:
            if call is None:
                content.add(text[begin : end + len(_CLOSE)])
            at = end + len(_CLOSE)
            continue
        if call is None and is_final:
            content.add(text[begin:])
        break
    return content.joined(is_final), calls
