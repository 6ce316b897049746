"""A parser for calls that a model writes as a list in Python: `[get_weather(city="Paris"), now()]`.

Llama 3.2 and 4 write them, the latter maybe between `<|python_start|>` and `<|python_end|>`. The
whole output is calls or text. Nothing is evaluated.
"""

import json
import re

from nanoserve.serve.http.tools.parse_result import Text, ToolCall
from nanoserve.serve.http.tools.partial_json import skip_space
from nanoserve.serve.http.tools.python_literal import read_literal

START, END = "<|python_start|>", "<|python_end|>"
NAMES = re.compile(r"[A-Za-z_][\w.-]*")  # of functions
_CALL = re.compile(rf"({NAMES.pattern})\(")
_CALL_SO_FAR = re.compile(rf"({NAMES.pattern})?\Z")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?=[^=])")
_KEYWORD_SO_FAR = re.compile(r"([A-Za-z_]\w*\s*=?)?\Z")


def parse(text: str, is_final: bool) -> tuple[str, list[ToolCall]]:
    """Return (content, calls).

    An output that does not begin with a call in a list is content. A call without keywords, as in
    `[f(1)]`, is none. A call that breaks off, or goes on with anything but keywords, stays
    incomplete, and content continues there.
    """
    content = Text()
    calls: list[ToolCall] = []
    at = skip_space(text, 0)
    if text.startswith(START, at):
        at = skip_space(text, at + len(START))
    elif START.startswith(text[at:]):  # a tag, or nothing yet
        content.add(text if is_final else "")
        return content.joined(is_final), calls
    if text[at : at + 1] != "[":
        may_come = at == len(text)
        content.add("" if may_come and not is_final else text)
        return content.joined(is_final), calls
    at = skip_space(text, at + 1)
    while True:
        call, end = _read_call(text, at)
        if call is None:
            if end is not None or is_final:
                content.add(text[at:] if calls else text)
            break
        content.end_piece()
        calls.append(call)
        if end is None:
            break
        if not call.is_complete:
            content.add(text[end:])
            break
        at = skip_space(text, end)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
            if at < len(text) and text[at] != "]":
                continue
        if at < len(text):
            content.add(_rest(text, at + (text[at] == "]"), is_final))
        break
    return content.joined(is_final), calls


def _rest(text: str, at: int, is_final: bool) -> str:
    """Return the content behind the list, without the tag that ends it."""
    rest = text[at:].lstrip()
    if rest.startswith(END):
        return rest[len(END) :]
    return "" if END.startswith(rest) and not is_final else rest


def _read_call(text: str, at: int) -> tuple[ToolCall | None, int | None]:
    """Return the call that begins at `at`, and the position after it: None if it may continue.

    The call is None if its name or its first keyword is not complete, or if it is none.
    """
    found = _CALL.match(text, at)
    if found is None:
        return None, None if _CALL_SO_FAR.match(text, at) else at
    name, written, begin = found[1], "{", at
    at = skip_space(text, found.end())
    while True:
        if text[at : at + 1] == ")":
            return ToolCall(name, written + "}", True), at + 1
        keyword = _KEYWORD.match(text, at)
        if keyword is None:
            is_call = len(written) > 1
            end = None if _KEYWORD_SO_FAR.match(text, at) else (at if is_call else begin)
            return (ToolCall(name, written, False) if is_call else None), end
        value = read_literal(text, keyword.end())
        if value.json is not None and value.end is not None:
            comma = ", " if len(written) > 1 else ""
            written += f"{comma}{json.dumps(keyword[1])}: {value.json}"
        if value.end is None:
            return ToolCall(name, written, False), value.stop
        at = skip_space(text, value.end)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
        elif text[at : at + 1] != ")":
            return ToolCall(name, written, False), None if at == len(text) else at
