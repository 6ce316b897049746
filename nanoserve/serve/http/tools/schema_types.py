"""Converts arguments that a model writes as plain text to JSON, by the tool's schema.

Some formats write each argument between tags without quotes, so `5` may be a number or a string.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from nanoserve.serve.http.tools.python_literal import as_json, is_json_number, read_literal

_NULLS = ("null", "none")
_MOST_FOLLOWED = 64  # schemas that are looked at for the types of one argument
_OF_VALUE: list[tuple[type, str]] = [
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
]
_STRING = frozenset({"string"})
Types = frozenset[str]


def types_of(function: Mapping[str, Any] | None, name: str) -> Types:
    """Return the JSON types that an argument may have; a string if nothing is known about it.

    function: the schema of the arguments of the function, or None.
    """
    if not isinstance(function, Mapping):
        return _STRING
    properties = function.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    schema = function.get("additionalProperties") if schema is None else schema
    return _types_in(schema, function) or _STRING


def value_so_far(raw: str, types: Types) -> str:
    """Return the JSON of an argument that may continue, without what may still change."""
    if not types <= {"string", "null"} or "string" not in types:
        return ""  # only strings can be read from left to right
    if "null" in types and any(null.startswith(raw.strip().lower()) for null in _NULLS):
        return ""
    return as_json(raw)[:-1]


def whole_value(raw: str, types: Types) -> str:
    """Return the JSON of a complete argument; a string if it is none of the types."""
    word = raw.strip()
    is_null = word.lower() in _NULLS
    if is_null and ("null" in types or "string" not in types):
        return "null"
    if types != _STRING:
        found, kind = _read(word)
        is_wanted = kind in types or (kind == "integer" and "number" in types)
        is_whole = kind == "number" and "integer" in types and float(found).is_integer()
        is_container = kind in ("array", "object") and types & {"array", "object"}
        if is_wanted or is_whole or (is_container and "string" not in types):
            return found
        if "boolean" in types and word.lower() in ("true", "false"):
            return word.lower()
    return as_json(raw)


def _read(word: str) -> tuple[str, str]:
    """Return a value as JSON, written as JSON or as Python, and its type; "" for other text."""
    if is_json_number(word):  # it may be too large for a float
        return word, "integer" if word.lstrip("-").isdigit() else "number"
    value: Any = None
    try:
        value = _parsed(word)
    except (ValueError, RecursionError):
        literal = read_literal(word + " ", 0)  # a space ends a number
        if literal.json is None or literal.end is None or word[literal.end :].strip():
            return "", ""
        word = literal.json
        try:
            value = _parsed(word)
        except (ValueError, RecursionError):
            return "", ""
    if isinstance(value, str) and value[:1] in ("{", "["):  # an object that was quoted
        inner, kind = _read(value) if value != word else ("", "")
        if kind in ("array", "object"):
            return inner, kind
    return word, _type_of(value)


def _parsed(word: str) -> Any:
    """Return what JSON says; only its type matters. Python refuses to convert long integers."""
    return json.loads(word, parse_int=float, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _type_of(value: Any) -> str:
    return next((name for kind, name in _OF_VALUE if isinstance(value, kind)), "null")


def _types_in(schema: Any, root: Mapping[str, Any]) -> Types:
    """Return the types that a schema names, in itself or in its alternatives."""
    types: set[str] = set()
    waiting, seen = [schema], 0
    while waiting and seen < _MOST_FOLLOWED:
        one, seen = waiting.pop(), seen + 1
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        if isinstance(kind, str):
            types.add(kind)
        elif isinstance(kind, list):
            types.update(name for name in kind if isinstance(name, str))
        elif "const" in one:
            types.add(_type_of(one["const"]))
        elif isinstance(one.get("enum"), list):
            types.update(map(_type_of, one["enum"]))
        else:
            waiting += _parts_of(one, root)
    return frozenset(types)


def _parts_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterable[Any]:
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            yield from schema[name]
    yield target_of(schema.get("$ref"), root)


def target_of(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a reference within `root` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for key in reference[2:].split("/"):
        key = key.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
