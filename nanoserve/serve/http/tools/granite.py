"""A parser for the calls of Granite 3, a list of objects after `<|tool_call|>`."""

from nanoserve.serve.http.tools.mistral import parse_after_tags, read_objects
from nanoserve.serve.http.tools.parse_result import ToolCall

TAG = "<|tool_call|>"
TAGS = (TAG, "<tool_call>")  # the second one is of Granite 3.0


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """Return (content, calls). Text after a tag that is not a list of calls is content."""
    return parse_after_tags(text, is_final, TAGS, _read_list)


def _read_list(text: str, at: int, is_final: bool) -> tuple[list[ToolCall], int | None]:
    if at == len(text):
        return [], None
    return read_objects(text, at, is_final) if text[at] in "[{" else ([], at)
