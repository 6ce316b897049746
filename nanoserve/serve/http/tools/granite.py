"""A parser for the calls of Granite 3, a list of objects after `<|tool_call|>`."""

from nanoserve.serve.http.tools.mistral import read_objects
from nanoserve.serve.http.tools.parse_result import Text, ToolCall, without_beginning_of
from nanoserve.serve.http.tools.partial_json import skip_space

TAG = "<|tool_call|>"
TAGS = (TAG, "<tool_call>")  # the second one is of Granite 3.0


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """Return (content, calls). Text after a tag that is not a list of calls is content."""
    content, calls, at = Text(), [], 0
    some: list[ToolCall]
    end: int | None
    while True:
        found = [(i, tag) for tag in TAGS if (i := text.find(tag, at)) >= 0]
        if not found:
            rest = text[at:]
            content.add(rest if is_final else without_beginning_of(rest, TAGS))
            break
        begin, tag = min(found)
        content.add(text[at:begin])
        first = skip_space(text, begin + len(tag))
        if first < len(text) and text[first] not in "[{":
            some, end = [], begin + len(tag)
        elif first == len(text):
            some, end = [], None
        else:
            some, end = read_objects(text, first, is_final)
        if some:
            content.end_piece()
            calls += some
        if end is None:  # the calls may continue
            if not some and is_final:
                content.add(text[begin:])
            break
        if not some:
            end = begin + len(tag)
            content.add(tag)
        at = end
    return content.joined(is_final), calls
