"""Regular expressions for strings that a model writes without quotes between tags."""

import json
import re
from collections.abc import Iterable
from typing import Any

from nanoserve.features.structured.regex import portable
from nanoserve.features.structured.schema_keywords import FORMATS

_ANY = r"(.|\n)"
_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_BY_FORMAT = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
}
# The first character of a string that cannot be taken for a value of another type.
_PLAIN = r"[^\s\d\[{(\"'+.-]"
# What in a pattern is more than a sequence of characters, classes and groups.
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[:P]|.", re.S)


class UnsupportedString(ValueError):
    """Raised for a keyword that strings without quotes cannot follow."""


def string_terminal(schema: dict[str, Any], close: str, ends: Iterable[str], is_alone: bool) -> str:
    """Return a terminal of Lark for a string and the tag `close` behind it.

    ends: all tags that end the string, so it contains none. is_alone: False if a value of another
    type is allowed, too, for which the string cannot be taken. Raises `UnsupportedString` that
    names a keyword.
    """
    low, high = schema.get("minLength") or 0, schema.get("maxLength")
    length = f"{{{low},{'' if high is None else high}}}" if low or high is not None else "*"
    behind = _escaped(close)
    parts = [f"/{_ANY}{length}{behind}/"]
    if schema.get("pattern") is not None:
        parts.append(f"/{_whole(schema['pattern'])}{behind}/")
    if schema.get("format") in FORMATS:
        known = _BY_FORMAT.get(schema["format"])
        if known is None:
            raise UnsupportedString(f"format={schema['format']!r}")
        parts.append(f"/{_slashed(portable(known))}{behind}/")
    if not is_alone:
        parts.append(f"/{_PLAIN}{_ANY}*/")
    inner = "|".join(map(_escaped, ends))
    return " & ".join([*parts, f"~/{_ANY}*({inner}){_ANY}+/"])


def literals(values: Iterable[Any], close: str, ends: Iterable[str]) -> list[str]:
    """Return alternatives of a rule for some strings. Raises `UnsupportedString`."""
    ends, texts = tuple(ends), []
    for value in values:
        if any(end in value for end in ends):
            raise UnsupportedString(f"enum: {value!r:.50} contains a tag, which")
        texts.append(json.dumps(value + close, ensure_ascii=False))
    return texts


def _whole(pattern: str) -> str:
    """Return an expression for whole strings, since a pattern of JSON schema may match anywhere."""
    tokens = _TOKEN.findall(pattern)
    begins, stops = tokens[:1] == ["^"], tokens[-1:] == ["$"]
    inner = tokens[begins : len(tokens) - stops]
    depth, has_choice = 0, False
    for token in inner:
        depth += token.startswith("(") - (token == ")")
        has_choice = has_choice or (token == "|" and depth == 0)
        if token in ("^", "$"):
            raise UnsupportedString(f"pattern={pattern!r:.80}: an anchor inside of it")
    if has_choice and (begins or stops):
        raise UnsupportedString(f"pattern={pattern!r:.80}: a choice next to an anchor")
    middle = _slashed(portable("".join(inner)))
    return f"{'' if begins else _ANY + '*'}({middle}){'' if stops else _ANY + '*'}"


def _slashed(regex: str) -> str:
    """Return an expression that may stand between slashes."""
    return regex.replace("\\/", "/").replace("/", r"\/").replace("\n", r"\n")


def _escaped(text: str) -> str:
    return _slashed(re.escape(text).replace("\\\n", r"\n"))
