"""Reject JSON schemas and regular expressions that xgrammar would not enforce correctly.

xgrammar ignores keywords that it does not support, so the output may not be valid under the schema.
This module lists the supported keywords and their combinations, and rejects all others with an
error that names them.
"""

import re
from typing import Any

from nanoserve.features.structured.regex import portable
from nanoserve.utils.checks import is_int, is_number, require, shown

_NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_NOTES |= {"$comment", "$schema", "$id", "$defs", "definitions"}
_ALLOWED = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"pattern", "minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum"},
    "boolean": set(),
    "null": set(),
}
_PYTHONS = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
_LARGEST = 2**53
_MOST_LENGTH = 10_000
_PLACES = 6  # decimal places that xgrammar keeps of a bound
_UNKNOWN = re.compile(r"\\[1-9bBAZzpPkKGg]|\(\?(?!:|P<\w+>)|(?<!\\)(?<!\[)[\^$]")


def known_schema(schema: Any, root: Any, path: str = "#") -> dict[str, Any]:
    """Return an equivalent schema with keywords that xgrammar enforces.

    root: the whole schema. path: the location of `schema` in it. Raises `ValueError` that names a
    keyword or combination which xgrammar does not support.
    """
    if not isinstance(schema, dict):
        raise ValueError(f"{shown(schema)} at {path} is not a schema that xgrammar supports")
    own = {name: value for name, value in schema.items() if name not in _NOTES}
    kept: dict[str, Any] = {}
    if path == "#":
        for name in ("$defs", "definitions"):
            kept |= {name: _each(schema[name], root, f"#/{name}")} if name in schema else {}
    if "$ref" in own:
        _require_alone(own, {"$ref"}, path)
        _check_ref(own["$ref"], root, path)
        return kept | own
    for name in ("const", "enum"):
        if name in own:
            _require_alone(own, {name, "type"}, path)
            values = own["enum"] if name == "enum" else [own["const"]]
            for value in values if isinstance(values, list) else []:
                _require_of_type(value, own.get("type"), path)
            return kept | {name: own[name]}
    if "anyOf" in own:
        _require_alone(own, {"anyOf"}, path)
        branches = enumerate(own["anyOf"])
        return kept | {"anyOf": [known_schema(s, root, f"{path}/anyOf/{i}") for i, s in branches]}
    kind = own.get("type")
    if isinstance(kind, list):
        _require_alone(own, {"type"}, path)
        return kept | {"anyOf": [known_schema({"type": one}, root, path) for one in kind]}
    if kind not in _ALLOWED:
        raise ValueError(
            f"type={shown(kind)} with the keywords {sorted(own)} at {path} is not supported by "
            f"xgrammar"
        )
    _require_alone(own, {"type"} | _ALLOWED[kind], path)
    known = {"object": _object, "array": _array, "string": _string}.get(kind, _number)
    return kept | known(own, root, path)


def known_regex(regex: str) -> str:
    """Rewrite `regex` into an equivalent form that xgrammar interprets correctly.

    Raises `ValueError` if `regex` uses a construct that xgrammar does not support.
    """
    regex = portable(regex, has_sets=False).removeprefix("^")
    if regex.endswith("$") and not regex.endswith("\\$"):
        regex = regex[:-1]
    found = _UNKNOWN.search(regex)
    if found is not None:
        raise ValueError(f"{found[0]!r} in {shown(regex)} is not supported by xgrammar")
    return re.sub(r"\(\?P<\w+>", "(?:", regex)


def _object(own: dict[str, Any], root: Any, path: str) -> dict[str, Any]:
    properties, others = own.get("properties", {}), own.get("additionalProperties", True)
    missing = sorted(set(own.get("required", [])) - set(properties))
    require(
        not missing,
        f"{missing} at {path} are required, but not described in properties, which xgrammar does "
        f"not support",
    )
    require(
        others is False or not properties,
        f"the object at {path} names properties and allows others, to which xgrammar could give "
        f"the same names; set additionalProperties to false (disable_additional_properties=True)",
    )
    if not properties:
        return {"type": "object", "additionalProperties": _any(others, root, path)}
    known = _each(properties, root, f"{path}/properties")
    return {"type": "object", "properties": known, "additionalProperties": False} | {
        "required": own.get("required", [])
    }


def _array(own: dict[str, Any], root: Any, path: str) -> dict[str, Any]:
    items = _any(own.get("items", True), root, f"{path}/items")
    return own | {"items": items}


def _string(own: dict[str, Any], root: Any, path: str) -> dict[str, Any]:
    lengths = {"minLength", "maxLength"} & own.keys()
    if "pattern" in own:
        require(
            not lengths,
            f"a pattern with {sorted(lengths)} at {path} is not supported by xgrammar",
        )
        return {"type": "string", "pattern": f"^{known_regex(own['pattern'])}$"}
    if not lengths:
        return {"type": "string"}
    low, high = own.get("minLength", 0), own.get("maxLength", "")
    for length in (low, high):
        is_good = length == "" or (is_int(length) and 0 <= length <= _MOST_LENGTH)
        require(
            is_good,
            f"length={shown(length)} at {path} must be an integer in [0, {_MOST_LENGTH}]",
        )
    # A pattern instead of the lengths: xgrammar would allow control characters, invalid in JSON.
    return {"type": "string", "pattern": rf'^[^"\\\x00-\x1f]{{{low},{high}}}$'}


def _number(own: dict[str, Any], root: Any, path: str) -> dict[str, Any]:
    for name, value in own.items():
        is_bound = name == "type" or (is_number(value) and abs(value) <= _LARGEST)
        require(is_bound, f"{name}={shown(value)} at {path} must be a number in [-2^53, 2^53]")
        is_kept = name == "type" or round(value, _PLACES) == value
        require(
            is_kept, f"{name}={shown(value)} at {path} must have at most {_PLACES} decimal places"
        )
    return own


def _any(schema: Any, root: Any, path: str) -> Any:
    """Return an equivalent schema. A schema that allows anything is returned unchanged."""
    return schema if schema in (True, False, {}) else known_schema(schema, root, path)


def _each(schemas: Any, root: Any, path: str) -> dict[str, Any]:
    require(isinstance(schemas, dict), f"{path} must be an object of schemas by name")
    return {name: known_schema(inner, root, f"{path}/{name}") for name, inner in schemas.items()}


def _require_alone(own: dict[str, Any], allowed: set[str], path: str) -> None:
    others = sorted(set(own) - allowed)
    require(
        not others,
        f"{others} at {path} is not supported by xgrammar, or not together with "
        f"{sorted(set(own) & allowed)}; the backend 'guidance' may support it",
    )


def _require_of_type(value: Any, kind: Any, path: str) -> None:
    if kind is None:
        return
    is_number_kind = kind in ("integer", "number")
    is_good = is_number(value) if is_number_kind else isinstance(value, _PYTHONS.get(kind, ()))
    require(is_good, f"{shown(value)} at {path} is not of type {shown(kind)}")


def _check_ref(ref: Any, root: Any, path: str) -> None:
    """Raise `ValueError` unless a reference has a target in `root`, without a circle."""
    seen = []
    while True:
        require(
            isinstance(ref, str) and ref.startswith(("#/$defs/", "#/definitions/")),
            f"$ref={shown(ref)} at {path} must refer to one of $defs, as '#/$defs/name'",
        )
        require(ref not in seen, f"$ref={shown(ref)} at {path} refers to itself in a circle")
        seen.append(ref)
        kind, _, name = ref.removeprefix("#/").partition("/")
        target: Any = root.get(kind, {}).get(name) if isinstance(root, dict) else None
        require(isinstance(target, dict), f"$ref={shown(ref)} at {path} has no target")
        if "$ref" not in target:
            return
        ref = target["$ref"]
