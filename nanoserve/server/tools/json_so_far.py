"""JSON that is still being written: which members of an object are there, and where they end.

Read once from left to right, without recursion. Brackets and strings are followed; whether a number
is one, say, is for whoever gets the text.
"""

import json
from typing import NamedTuple

_SPACE = " \t\n\r"
_CLOSING = {"{": "}", "[": "]"}


class Member(NamedTuple):
    """A member's value is `text[start:end]`, so far."""

    start: int
    end: int
    is_complete: bool


class ObjectSoFar(NamedTuple):
    """members: by key, of several equal ones the first. end: behind the closing brace, or None.

    is_bad: what stands there is no object, whatever may come.
    """

    members: dict[str, Member]
    end: int | None
    is_bad: bool


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def read_object(text: str, at: int) -> ObjectSoFar:
    """The object that begins at `at`, behind spaces perhaps."""
    members: dict[str, Member] = {}
    at = skip_space(text, at)
    if text[at : at + 1] != "{":
        return ObjectSoFar(members, None, at < len(text))
    at = skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return ObjectSoFar(members, at + 1, False)
    while at < len(text):
        key_end = end_of_value(text, at) if text[at] == '"' else -1
        if key_end is None:
            break
        key = text_of(text[at:key_end]) if key_end > 0 else None
        at = skip_space(text, max(key_end, 0))
        if key is None or text[at : at + 1] not in (":", ""):
            return ObjectSoFar(members, None, True)
        start = skip_space(text, at + 1)
        if start >= len(text):
            break
        end = end_of_value(text, start)
        members.setdefault(key, Member(start, len(text) if end is None else end, end is not None))
        if end is None:
            break
        at = skip_space(text, end)
        separator = text[at : at + 1]
        if end == start or separator not in (",", "}", ""):
            return ObjectSoFar(members, None, True)
        if separator == "}":
            return ObjectSoFar(members, at + 1, False)
        at = skip_space(text, at + 1)
    return ObjectSoFar(members, None, False)


def end_of_value(text: str, at: int) -> int | None:
    """Behind the value that begins at `at`; None if more of it may come."""
    if text[at] == '"':
        return _end_of_string(text, at)
    if text[at] not in _CLOSING:  # a number, a word: whatever ends it must have come
        end = at
        while end < len(text) and text[end] not in ",]}" + _SPACE:
            end += 1
        return end if end < len(text) else None
    expected: list[str] = []
    while at < len(text):
        character = text[at]
        if character == '"':
            end = _end_of_string(text, at)
            if end is None:
                return None
            at = end
            continue
        if character in _CLOSING:
            expected.append(_CLOSING[character])
        elif character in "]}":
            if expected.pop() != character:
                return at  # which nobody expects there
            if not expected:
                return at + 1
        at += 1
    return None


def _end_of_string(text: str, at: int) -> int | None:
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == '"':
            return at + 1
        else:
            at += 1
    return None


def text_of(literal: str) -> str | None:
    """What a string of JSON says; None if it is none."""
    try:
        return json.loads(literal, strict=False)
    except ValueError:
        return None
