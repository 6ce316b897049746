"""A parser for the calls of Llama 3, whose complete output is JSON with one object per call."""

from nanoserve.serve.http.tools.parse_result import Text, ToolCall, call_of
from nanoserve.serve.http.tools.partial_json import read_object, skip_space

TAG = "<|python_tag|>"


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """Return (content, calls).

    An output that does not begin with an object, or whose object has no arguments, is content: the
    user may have requested JSON. After the calls, any other text is content.
    """
    content, at = Text(), 0
    calls: list[ToolCall] = []
    while True:
        begin = _skip(text, at, bool(calls))
        rest = text[begin:]
        if not rest or (TAG.startswith(rest) and not rest.startswith("{")):
            if is_final:
                content.add(text[at:])
            break
        found = read_object(text, begin)
        call = call_of(text, found, needs_arguments=True)
        ended_at = found.stop if found.end is None else found.end
        if call is None and (ended_at is not None or is_final):
            content.add(text[at:] if not calls else rest)
        if call is None:
            break
        content.end_piece()
        calls.append(call)
        if ended_at is None:
            break
        if found.end is None:
            content.add(text[ended_at:])
            break
        at = ended_at
    return content.joined(is_final), calls


def _skip(text: str, at: int, is_behind_a_call: bool) -> int:
    """Return the position after optional whitespace, separators and the tag before an object."""
    at = skip_space(text, at)
    while is_behind_a_call and text[at : at + 1] in (";", ","):
        at = skip_space(text, at + 1)
    if text.startswith(TAG, at):
        at = skip_space(text, at + len(TAG))
    return at
