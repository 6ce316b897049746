"""A parser for incomplete JSON, which finds the members of an object and where they end.

It reads once from left to right, without recursion, and stops where the text is no longer JSON:
after a missing brace, the following text must not be taken for a part of the call.
"""

import json
import re
from typing import NamedTuple

_SPACE = " \t\n\r"
_CLOSING = {"{": "}", "[": "]"}
_WORD = re.compile(r"[\w.+-]+")
_NUMBER_SO_FAR = re.compile(r"-?(\d+(\.\d*)?([eE][+-]?\d*)?)?")
_LITERALS = ("true", "false", "null")
_WHOLE_WORD = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null")


class Member(NamedTuple):
    """The position of the value of a member so far, `text[start:end]`."""

    start: int
    end: int
    is_complete: bool


class ObjectSoFar(NamedTuple):
    """An object that may be incomplete.

    members: by key; of equal keys, the first. end: position after the closing brace, or None.
    stop: position from which it cannot be an object, whatever follows; None if it still can.
    """

    members: dict[str, Member]
    end: int | None
    stop: int | None = None


class Value(NamedTuple):
    """The extent of a value that may be incomplete.

    end: position after it; None if it may continue. stop: position from which it cannot be a value,
    or None.
    """

    end: int | None
    stop: int | None = None


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def read_object(text: str, at: int) -> ObjectSoFar:
    """Parse the object that begins at `at`, after optional whitespace."""
    members: dict[str, Member] = {}
    at = skip_space(text, at)
    if text[at : at + 1] != "{":
        return ObjectSoFar(members, None, at if at < len(text) else None)
    at = skip_space(text, at + 1)
    if text[at : at + 1] == "}":
        return ObjectSoFar(members, at + 1)
    while at < len(text):
        if text[at] != '"':
            return ObjectSoFar(members, None, at)
        key_end = _end_of_string(text, at)
        if key_end is None:
            break
        key, begin = text_of(text[at:key_end]), at
        at = skip_space(text, key_end)
        if key is None or text[at : at + 1] not in (":", ""):
            return ObjectSoFar(members, None, begin)
        start = skip_space(text, at + 1)
        if start >= len(text):
            break
        value = read_value(text, start)
        so_far = next((i for i in (value.end, value.stop) if i is not None), len(text))
        members.setdefault(key, Member(start, so_far, value.end is not None))
        if value.end is None:
            return ObjectSoFar(members, None, value.stop)
        at = skip_space(text, value.end)
        if text[at : at + 1] not in (",", "}", ""):
            return ObjectSoFar(members, None, at)
        if text[at : at + 1] == "}":
            return ObjectSoFar(members, at + 1)
        at = skip_space(text, at + 1)
    return ObjectSoFar(members, None)


def read_value(text: str, at: int) -> Value:
    """Parse the value that begins at `at`."""
    closing: list[str] = []  # closing brackets of the open lists and objects
    wanted = "value"  # the next item: "value", "key", "colon" or "separator"
    may_close = False  # True if a closing bracket may come instead
    while True:
        at = skip_space(text, at)
        if at >= len(text):
            return Value(None)
        character = text[at]
        if closing and may_close and character == closing[-1]:
            closing.pop()
            at += 1
        elif wanted == "separator" and character == ",":
            wanted, may_close = ("key" if closing[-1] == "}" else "value"), False
            at += 1
            continue
        elif wanted == "colon" and character == ":":
            wanted, may_close = "value", False
            at += 1
            continue
        elif wanted in ("value", "key") and character == '"':
            end = _end_of_string(text, at)
            if end is None:
                return Value(None)
            at = end
            if wanted == "key":
                wanted = "colon"
                may_close = False
                continue
        elif wanted == "value" and character in _CLOSING:
            closing.append(_CLOSING[character])
            wanted, may_close = ("key" if character == "{" else "value"), True
            at += 1
            continue
        elif wanted == "value" and (word := _WORD.match(text, at)) is not None:
            known = at + _longest_beginning(word[0])
            if known < word.end():
                return Value(None, known)
            if word.end() == len(text):
                return Value(None)  # it may continue
            if _WHOLE_WORD.fullmatch(word[0]) is None:
                return Value(None, known)
            at = word.end()
        else:
            return Value(None, at)
        if not closing:
            return Value(at)
        wanted, may_close = "separator", True


def text_of(literal: str) -> str | None:
    """Return the value of a JSON string; None if it is not a string or not valid Unicode."""
    try:
        value = json.loads(literal, strict=False)
        value.encode()
    except (ValueError, AttributeError):
        return None
    return value


def _longest_beginning(word: str) -> int:
    """Return the length of the longest prefix of `word` that can begin a number or a literal."""
    number = _NUMBER_SO_FAR.match(word)
    of_number, of_literal = 0 if number is None else number.end(), 0
    while of_literal < len(word):
        if not any(literal.startswith(word[: of_literal + 1]) for literal in _LITERALS):
            break
        of_literal += 1
    return max(of_number, of_literal)


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
