"""A reader for incomplete Python literals, which writes them as JSON.

It takes strings, numbers, lists, tuples, dictionaries and the three constants, and JSON's names of
the constants, too. It reads once from left to right, without recursion and without evaluating.
"""

import json
import re
from typing import NamedTuple

from nanoserve.serve.http.tools.partial_json import skip_space

_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANTS |= {name: name for name in _CONSTANTS.values()}
_WORD = re.compile(r"[\w.+-]+")
_INTEGER = re.compile(r"[+-]?\d(_?\d)*")
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_NUMBER = re.compile(r"[+-]?(\d(_?\d)*\.?(\d(_?\d)*)?|\.\d(_?\d)*)([eE][+-]?\d+)?")
_QUOTE = re.compile(r"'''|\"\"\"|'|\"")
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.S)
_ESCAPES = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MOST_DIGITS = 4000  # Python refuses to convert longer integers


class Literal(NamedTuple):
    """A literal that begins at some position of a text, and may be incomplete.

    json: its value as JSON; None unless it is complete. end: the position after it; None if it may
    continue. stop: the position from which it cannot be a literal, or None.
    """

    json: str | None
    end: int | None
    stop: int | None = None


def read_literal(text: str, at: int) -> Literal:
    """Read the literal that begins at `at`, after optional whitespace."""
    parts: list[str] = []
    closing: list[str] = []  # closing brackets of the open containers
    wanted, may_close = "value", False  # the next item: "value", "key", "colon" or "separator"
    while True:
        at = skip_space(text, at)
        if at >= len(text):
            return Literal(None, None)
        character = text[at]
        if closing and may_close and character == closing[-1]:
            parts.append("}" if closing.pop() == "}" else "]")
            at += 1
        elif wanted == "separator" and character == ",":
            at = skip_space(text, at + 1)
            if text[at : at + 1] != closing[-1]:  # Python allows a comma before the bracket
                if at >= len(text):
                    return Literal(None, None)
                parts.append(", ")
                wanted, may_close = ("key" if closing[-1] == "}" else "value"), False
            continue
        elif wanted == "colon" and character == ":":
            parts.append(": ")
            wanted, may_close = "value", False
            at += 1
            continue
        elif wanted == "value" and character in _CLOSING:
            closing.append(_CLOSING[character])
            parts.append("{" if character == "{" else "[")
            wanted, may_close = ("key" if character == "{" else "value"), True
            at += 1
            continue
        elif wanted in ("value", "key"):
            one = _read_scalar(text, at)
            if one.json is None or one.end is None:
                return one
            parts.append(_as_key(one.json) if wanted == "key" else one.json)
            at = one.end
            if wanted == "key":
                wanted, may_close = "colon", False
                continue
        else:
            return Literal(None, None, at)
        if not closing:
            return Literal("".join(parts), at)
        wanted, may_close = "separator", True


def _read_scalar(text: str, at: int) -> Literal:
    quote = _QUOTE.match(text, at)
    if quote is not None:
        return _read_string(text, quote.end(), quote[0])
    word = _WORD.match(text, at)
    if word is None:
        return Literal(None, None, at)
    value = _CONSTANTS.get(word[0]) or _as_number(word[0])
    if word.end() == len(text):  # it may continue; what it cannot become is said at its end
        return Literal(None, None)
    return Literal(value, word.end()) if value is not None else Literal(None, None, at)


def _read_string(text: str, start: int, quote: str) -> Literal:
    """Read a string whose content begins at `start`."""
    at = start
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif at == start and len(quote) == 1 and text[at:] == quote:
            break  # a third quote may follow
        elif text.startswith(quote, at):
            return Literal(as_json(_unescaped(text[start:at])), at + len(quote))
        else:
            at += 1
    return Literal(None, None)


def as_json(text: str) -> str:
    """Return a string as JSON. Halves of surrogate pairs are joined, and single ones replaced."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(whole, ensure_ascii=False)


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_character, text) if "\\" in text else text


def _character(escape: re.Match[str]) -> str:
    """Return what an escape stands for; an unknown one is kept without its backslash."""
    name = escape[1]
    if name in _ESCAPES:
        return _ESCAPES[name]
    if len(name) > 1 and name[0] in "xuU":
        code = int(name[1:], 16)
        return chr(code) if code < 0x110000 else "\N{REPLACEMENT CHARACTER}"
    return chr(int(name, 8)) if name[0] in "01234567" else name


def _as_number(word: str) -> str | None:
    """Return a number as JSON; None for other words.

    One that is too large for a float or for Python stays as it is, if it is written as in JSON.
    """
    if _NUMBER.fullmatch(word) is None:
        return None
    as_written = word if is_json_number(word) else None
    if len(word) > _MOST_DIGITS:
        return as_written
    if _INTEGER.fullmatch(word) is not None:
        return str(int(word))
    value = float(word.replace("_", ""))
    return repr(value) if abs(value) != float("inf") else as_written


def is_json_number(word: str) -> bool:
    """Return True for a number as JSON writes it, however large."""
    return _JSON_NUMBER.fullmatch(word) is not None


def _as_key(value: str) -> str:
    """Return a key of a dictionary as JSON, where it is a string."""
    return value if value.startswith('"') else json.dumps(value)
