"""What xgrammar makes of a JSON schema or a regular expression as it was meant, and nothing else.

It passes over what it does not know, and then the output is not what was asked for. So here is a
list of what it does know, by itself and in which company; all else is refused by name.
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
_PLACES = 6  # that are kept of a bound
_UNKNOWN = re.compile(r"\\[1-9bBAZzpPkKGg]|\(\?(?!:|P<\w+>)|(?<!\\)(?<!\[)[\^$]")


def known_schema(schema: Any, root: Any, path: str = "#") -> dict[str, Any]:
    """The same schema, in words that mean the same to xgrammar. `ValueError` names what it has no
    words for; path: where in the whole, which is `root`."""
    if not isinstance(schema, dict):
        raise ValueError(f"{shown(schema)} at {path} is no schema that xgrammar knows")
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
            f"type={shown(kind)} beside {sorted(own)} at {path} is none that xgrammar knows"
        )
    _require_alone(own, {"type"} | _ALLOWED[kind], path)
    known = {"object": _object, "array": _array, "string": _string}.get(kind, _number)
    return kept | known(own, root, path)


def known_regex(regex: str) -> str:
    """The same without what xgrammar reads in another way, or `ValueError`."""
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
    require(not missing, f"{missing} at {path} are required, and no properties")
    require(
        others is False or not properties,
        f"the object at {path} names properties and may have others: xgrammar would let these have "
        f"the same names; set additionalProperties to false (disable_additional_properties)",
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
            not lengths, f"a pattern with {sorted(lengths)} at {path} is more than xgrammar knows"
        )
        return {"type": "string", "pattern": f"^{known_regex(own['pattern'])}$"}
    if not lengths:
        return {"type": "string"}
    low, high = own.get("minLength", 0), own.get("maxLength", "")
    for length in (low, high):
        is_good = length == "" or (is_int(length) and 0 <= length <= _MOST_LENGTH)
        require(is_good, f"length={shown(length)} at {path} must be at most {_MOST_LENGTH}")
    # By itself it would count control characters, which are none in JSON.
    return {"type": "string", "pattern": rf'^[^"\\\x00-\x1f]{{{low},{high}}}$'}


def _number(own: dict[str, Any], root: Any, path: str) -> dict[str, Any]:
    for name, value in own.items():
        is_bound = name == "type" or (is_number(value) and abs(value) <= _LARGEST)
        require(is_bound, f"{name}={shown(value)} at {path} is beyond 2^53")
        is_kept = name == "type" or round(value, _PLACES) == value
        require(is_kept, f"{name}={shown(value)} at {path} has more than {_PLACES} decimal places")
    return own


def _any(schema: Any, root: Any, path: str) -> Any:
    """Also of what may be anything."""
    return schema if schema in (True, False, {}) else known_schema(schema, root, path)


def _each(schemas: Any, root: Any, path: str) -> dict[str, Any]:
    require(isinstance(schemas, dict), f"{path} must hold schemas by name")
    return {name: known_schema(inner, root, f"{path}/{name}") for name, inner in schemas.items()}


def _require_alone(own: dict[str, Any], allowed: set[str], path: str) -> None:
    others = sorted(set(own) - allowed)
    require(
        not others,
        f"{others} at {path} is not supported by xgrammar, or not together with "
        f"{sorted(set(own) & allowed)}; the backend 'guidance' may know it",
    )


def _require_of_type(value: Any, kind: Any, path: str) -> None:
    if kind is None:
        return
    is_number_kind = kind in ("integer", "number")
    is_good = is_number(value) if is_number_kind else isinstance(value, _PYTHONS.get(kind, ()))
    require(is_good, f"{shown(value)} at {path} is not of type {shown(kind)}")


def _check_ref(ref: Any, root: Any, path: str) -> None:
    """It must lead to something, and not in a circle, through the whole schema."""
    seen = []
    while True:
        require(
            isinstance(ref, str) and ref.startswith(("#/$defs/", "#/definitions/")),
            f"$ref={shown(ref)} at {path} must be one of $defs",
        )
        require(ref not in seen, f"$ref={shown(ref)} at {path} leads in a circle")
        seen.append(ref)
        kind, _, name = ref.removeprefix("#/").partition("/")
        target = root.get(kind, {}).get(name) if isinstance(root, dict) else None
        require(isinstance(target, dict), f"$ref={shown(ref)} at {path} leads nowhere")
        if "$ref" not in target:
            return
        ref = target["$ref"]
