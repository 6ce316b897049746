"""A parser for calls that have a tag around each argument, as those of Qwen3-Coder and of GLM.

    <tool_call>                                   <tool_call>get_weather
    <function=get_weather>                        <arg_key>city</arg_key>
    <parameter=city>                              <arg_value>Paris</arg_value>
    Paris                                         </tool_call>
    </parameter>
    </function>
    </tool_call>

Arguments are written without quotes; the schemas of the tools say which of them are strings.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from nanoserve.serve.http.tools.parse_result import Text, ToolCall, without_beginning_of
from nanoserve.serve.http.tools.partial_json import skip_space
from nanoserve.serve.http.tools.schema_types import types_of, value_so_far, whole_value

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the name of the function
_NAME = re.compile(r"[\w.:/-]+")
_KEY = re.compile(r"[^<>\"\n]+")


@dataclass(frozen=True)
class Tags:
    """The tags of one format.

    open, close: around one call or several. name_open, name_close: around the name of a function;
    if both are empty, an argument or `close` follows the name. call_close: after each call; "" if
    `close` ends it. key_open, key_close: around the name of an argument. value_open, value_close:
    around its value; an empty `value_open` is no tag. pads: True if a line feed stands before and
    after a value.
    """

    open: str
    close: str
    key_open: str
    key_close: str
    value_close: str
    value_open: str = ""
    name_open: str = ""
    name_close: str = ""
    call_close: str = ""
    pads: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """The tags that may begin a call, `open` first. Models leave out the first one of two."""
        return (self.open, self.name_open) if self.name_open else (self.open,)

    @property
    def ends_of_call(self) -> tuple[str, ...]:
        return (self.call_close, self.close) if self.call_close else (self.close,)

    @cached_property
    def ends_of_value(self) -> tuple[str, ...]:
        """The ends of a value. Models leave out the closing tag before another on a new line."""
        others = (f"\n{self.key_open}", f"\n{self.ends_of_call[0]}") if self.pads else ()
        return (self.value_close, *others)

    @cached_property
    def end_of_value(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.ends_of_value)))


class _Name(NamedTuple):
    """The name of a function, "" if there is none, and the position after it.

    The position is None if the name may be incomplete.
    """

    text: str
    end: int | None


def parse(
    text: str, is_final: bool, tags: Tags, schemas: Schemas | None = None
) -> tuple[str, list[ToolCall]]:
    """Return (content, calls). Text between the tags that is not a call is content, unchanged.

    A call that breaks off, or that goes on with anything but arguments, stays incomplete, and
    content continues there. schemas: of the functions of a request.
    """
    schemas = schemas or {}
    content, calls, at = Text(), [], 0
    is_open = False  # True behind a call if its section has not been closed
    while True:
        found = [i for i in (text.find(tag, at) for tag in tags.starts) if i >= 0]
        if not found:
            rest = text[at:]
            content.add(rest if is_final else without_beginning_of(rest, tags.starts))
            break
        begin = min(found)
        content.add(text[at:begin])
        is_bare = not text.startswith(tags.open, begin)
        behind_tag = begin + len(tags.name_open if is_bare else tags.open)
        name = _read_name(text, begin if is_bare else behind_tag, tags)
        if name.text and name.end is None:  # it may become one
            content.add(text[begin:] if is_final else "")
            break
        is_expected = not is_bare or (is_open and not text[at:begin].strip())
        if name.end is None or not (is_expected or name.text in schemas):
            content.add(text[begin:behind_tag])
            is_open, at = False, behind_tag
            continue
        content.end_piece()
        call, end = _read_arguments(text, name.end, name.text, tags, schemas, is_final)
        calls.append(call)
        if end is None:
            break
        closed: int | None = end
        if call.is_complete:
            closed = _behind_close(text, end, tags)
        if closed is None:
            break
        is_open, at = call.is_complete and closed == end, closed
    return content.joined(is_final), calls


def _read_name(text: str, at: int, tags: Tags) -> _Name:
    """Read the name of a function, with its tags. Its text is "?" where it has not begun."""
    at = skip_space(text, at)
    if not text.startswith(tags.name_open, at):
        return _Name("?" if tags.name_open.startswith(text[at:]) else "", None)
    at += len(tags.name_open)
    if at == len(text):
        return _Name("?", None)
    found = _NAME.match(text, at)
    if found is None:
        return _Name("", None)
    followers, at = [tags.name_close], found.end()
    if not tags.name_close:
        followers, at = [tags.key_open, tags.close], skip_space(text, at)
    for follower in followers:
        if text.startswith(follower, at):
            return _Name(found[0], at + len(tags.name_close))
    may_follow = any(follower.startswith(text[at:]) for follower in followers)
    return _Name(found[0] if may_follow else "", None)


def _read_arguments(
    text: str, at: int, name: str, tags: Tags, schemas: Schemas, is_final: bool
) -> tuple[ToolCall, int | None]:
    """Return a call and the position after it: None if it may continue."""
    written = "{"

    def call(is_complete: bool) -> ToolCall:
        return ToolCall(name, written + "}" if is_complete else written, is_complete)

    while True:
        at = skip_space(text, at)
        for tag in tags.ends_of_call:
            if text.startswith(tag, at):  # a missing `call_close` is as good
                return call(True), at + len(tag) if tag == tags.ends_of_call[0] else at
        if not text.startswith(tags.key_open, at):
            may_follow = (*tags.ends_of_call, tags.key_open)
            if any(tag.startswith(text[at:]) for tag in may_follow):
                return call(is_final), None  # the last tags may be left out
            return call(False), at
        key_start = at + len(tags.key_open)
        key = _KEY.match(text, key_start)
        key_end = key_start if key is None else key.end()
        if not text.startswith(tags.key_close, key_end):
            return call(False), None if tags.key_close.startswith(text[key_end:]) else at
        start = key_end + len(tags.key_close)
        if tags.value_open:
            start = skip_space(text, start)
            if not text.startswith(tags.value_open, start):
                return call(False), None if tags.value_open.startswith(text[start:]) else at
            start += len(tags.value_open)
        key_name = text[key_start:key_end].strip()
        types = types_of(schemas.get(name), key_name)
        value, end = _read_value(text, start, tags)
        so_far = value_so_far(value, types) if end is None else whole_value(value, types)
        if so_far:
            comma = ", " if len(written) > 1 else ""
            written += f"{comma}{json.dumps(key_name, ensure_ascii=False)}: {so_far}"
        if end is None:
            return call(False), None
        at = end


def _read_value(text: str, start: int, tags: Tags) -> tuple[str, int | None]:
    """Return a value and the position after it: None if it may continue."""
    found = tags.end_of_value.search(text, start)
    if found is None:
        value, end = without_beginning_of(text[start:], tags.ends_of_value), None
    else:
        value = text[start : found.start()]
        end = found.end() if found[0] == tags.value_close else found.start()
    if tags.pads:
        is_closed = found is not None and found[0] == tags.value_close
        value = value.removeprefix("\n")
        value = value.removesuffix("\n") if is_closed or end is None else value
    return value, end


def _behind_close(text: str, at: int, tags: Tags) -> int | None:
    """Return the position after the closing tag; `at` if there is none, None if it may follow."""
    behind = at if text.startswith(tags.close, at) else skip_space(text, at)
    if not tags.call_close:  # it has been read
        return at
    if text.startswith(tags.close, behind):
        return behind + len(tags.close)
    return None if tags.close.startswith(text[behind:]) else at


QWEN3_CODER = Tags(
    open="<tool_call>",
    close="</tool_call>",
    name_open="<function=",
    name_close=">",
    call_close="</function>",
    key_open="<parameter=",
    key_close=">",
    value_close="</parameter>",
    pads=True,
)
SEED_OSS = replace(QWEN3_CODER, open="<seed:tool_call>", close="</seed:tool_call>", pads=False)
MINIMAX_M2 = Tags(
    open="<minimax:tool_call>",
    close="</minimax:tool_call>",
    name_open='<invoke name="',
    name_close='">',
    call_close="</invoke>",
    key_open='<parameter name="',
    key_close='">',
    value_close="</parameter>",
)
GLM = Tags(
    open="<tool_call>",
    close="</tool_call>",
    key_open="<arg_key>",
    key_close="</arg_key>",
    value_open="<arg_value>",
    value_close="</arg_value>",
)
