"""A parser for calls within a section of special tokens, as those of DeepSeek and of Kimi.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

(It is one line.) Arguments are JSON; DeepSeek-V3 writes them as a block of Markdown.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from nanoserve.serve.http.tools.parse_result import Text, ToolCall, without_beginning_of
from nanoserve.serve.http.tools.partial_json import read_value, skip_space

_NAME = re.compile(r"[\w.:/-]+")
_NUMBERED = re.compile(r"(?:functions\.)?([\w./-]+):\d+")


@dataclass(frozen=True)
class Section:
    """The tokens of one format.

    open, close: around all calls. call_open, call_close: around each. before_name: text between
    `call_open` and the name. arguments_open, arguments_close: around the arguments. is_numbered:
    True if the name is part of an id, as functions.get_weather:0.
    """

    open: str
    close: str
    call_open: str
    call_close: str
    arguments_open: str
    arguments_close: str = ""
    before_name: str = ""
    is_numbered: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """The tokens that may begin a call, `open` first. Models leave out the first one."""
        return self.open, self.call_open

    @property
    def special_tokens(self) -> tuple[str, ...]:
        tokens = self.open, self.close, self.call_open, self.call_close
        return (*tokens, _SEP if _SEP in self.call_begin else self.arguments_open)

    @property
    def call_begin(self) -> str:
        """A call up to its arguments, with %s for the name."""
        name = "functions.%s:0" if self.is_numbered else "%s"
        return f"{self.call_open}{self.before_name}{name}{self.arguments_open}"

    @property
    def call_end(self) -> str:
        return self.arguments_close + self.call_close


class _Header(NamedTuple):
    """The name of a call, and the position of its arguments: None if they may still begin."""

    name: str
    end: int | None


def parse(text: str, is_final: bool, section: Section) -> tuple[str, list[ToolCall]]:
    """Return (content, calls). Text in a section that is not a call is content, unchanged.

    A call that breaks off, or whose arguments prove not to be JSON, stays incomplete, and content
    continues there.
    """
    starts = section.starts
    content, calls, at = Text(), [], 0
    while True:
        found = [i for i in (text.find(tag, at) for tag in starts) if i >= 0]
        if not found:
            rest = text[at:]
            content.add(rest if is_final else without_beginning_of(rest, starts))
            break
        begin = min(found)
        content.add(text[at:begin])
        start = begin
        if text.startswith(section.open, begin):
            start = skip_space(text, begin + len(section.open))
        header = _read_header(text, start, section)
        if header is None:  # no call
            at = start if start > begin else begin + len(section.call_open)
            content.add(text[begin:at])
            continue
        call, end = None, header.end
        if end is not None:
            call, end = _read_call(text, end, header.name)
        if call is None and end is None:
            content.add(text[begin:] if is_final else "")
            break
        if call is None:
            content.add(text[begin:end])
        else:
            content.end_piece()
            calls.append(call)
        if call is not None and end is not None:
            end = _behind_call(text, end, section)
        if end is None:
            break
        at = end
    return content.joined(is_final), calls


def _read_header(text: str, at: int, section: Section) -> _Header | None:
    """Return the header of the call that begins at `at`; None if none begins there."""
    for literal in (section.call_open, section.before_name):
        if not text.startswith(literal, at):
            return _Header("", None) if literal.startswith(text[at:]) else None
        at = skip_space(text, at + len(literal)) if literal else at
    found = _NAME.match(text, at)
    if found is None:
        return _Header("", None) if at >= len(text) else None
    at = found.end()
    for opening in (section.arguments_open, " " + section.arguments_open):
        if text.startswith(opening, at):
            return _Header(found[0], at + len(opening))
        if opening.startswith(text[at:]):
            return _Header("", None)
    return None


def _read_call(text: str, at: int, name: str) -> tuple[ToolCall | None, int | None]:
    """Return the call whose arguments begin at `at`, and the position after them.

    The call is None if they are no object; the position is None if they may continue.
    """
    at = skip_space(text, at)
    numbered = _NUMBERED.fullmatch(name)
    own_id = None if numbered is None else name
    name = name if numbered is None else numbered[1]
    if at >= len(text):
        return None, None
    if text[at] != "{":
        is_empty = text[at] in "<`"  # a tag; some models leave an empty object out
        return (ToolCall(name, "{}", True, own_id) if is_empty else None), at
    value = read_value(text, at)
    end = value.stop if value.end is None else value.end
    return ToolCall(name, text[at:end], value.end is not None, own_id), end


def _behind_call(text: str, at: int, section: Section) -> int | None:
    """Return the position after the closing tags; None if further ones may follow."""
    for tag in (section.arguments_close.strip(), section.call_close, section.close):
        behind = skip_space(text, at)
        if tag and text.startswith(tag, behind):
            at = behind + len(tag)
        elif tag and tag.startswith(text[behind:]):
            return None
    return at


_SEP = "<｜tool▁sep｜>"
DEEPSEEK_V31 = Section(
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    call_open="<｜tool▁call▁begin｜>",
    call_close="<｜tool▁call▁end｜>",
    arguments_open=_SEP,
)
DEEPSEEK_V3 = Section(
    open=DEEPSEEK_V31.open,
    close=DEEPSEEK_V31.close,
    call_open=DEEPSEEK_V31.call_open,
    call_close=DEEPSEEK_V31.call_close,
    before_name=f"function{_SEP}",
    arguments_open="\n```json\n",
    arguments_close="\n```",
)
KIMI_K2 = Section(
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    call_open="<|tool_call_begin|>",
    call_close="<|tool_call_end|>",
    arguments_open="<|tool_call_argument_begin|>",
    is_numbered=True,
)
