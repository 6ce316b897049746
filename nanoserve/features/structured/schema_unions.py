"""Which schemas may be closed to what they do not name, and which exclude each other."""

from collections.abc import Callable
from typing import Any

from nanoserve.features.structured.schema_keywords import assertions_of
from nanoserve.utils.checks import is_int


def closing(own: dict[str, Any], draft_is_old: bool) -> dict[str, Any]:
    """Return the keywords that close a schema which says nothing of further properties or items.

    An object that names no properties at all stays open: any object is meant. So does one that
    needs a property which it does not describe.
    """
    more: dict[str, Any] = {}
    names, patterns = own.get("properties"), own.get("patternProperties")
    if (isinstance(names, dict) or patterns) and "additionalProperties" not in own:
        names = names or {}
        is_whole = needed(own) <= set(names) and own.get("minProperties", 0) <= len(names)
        if is_whole or patterns:
            more["additionalProperties"] = False
    first = own.get("prefixItems")
    if isinstance(own.get("items"), list):
        if "additionalItems" not in own and own.get("minItems", 0) <= len(own["items"]):
            more["additionalItems"] = False
    elif isinstance(first, list) and "items" not in own and not draft_is_old:
        more |= {"items": False} if own.get("minItems", 0) <= len(first) else {}
    return more


def needed(own: dict[str, Any]) -> set[str]:
    """Return the names that a schema requires, in branches that only require names as well."""
    names = set(own.get("required") or ())
    for name in ("allOf", "anyOf", "oneOf"):
        if name in own and only_requires(own, name):
            names.update(*(branch.get("required", ()) for branch in own[name]))
    return names


def only_requires(own: dict[str, Any], name: str) -> bool:
    """Tell whether the branches of a keyword ask for nothing but that properties are there."""
    branches = own[name]
    return isinstance(branches, list) and all(
        isinstance(branch, dict) and assertions_of(branch).keys() == {"required"}
        for branch in branches
    )


def are_disjoint(branches: Any, target: Callable[[Any], Any]) -> bool:
    """Tell whether it is plain that no value is valid under two of these schemas.

    Their types differ, or they are objects that all need one property whose values differ.
    target: what a schema is another name of.
    """
    if not isinstance(branches, list):
        return False
    objects, kinds = [], set()
    for branch in map(target, branches):
        own = assertions_of(branch) if isinstance(branch, dict) else {}
        kind = own.get("type")
        if kind == "object":
            objects.append(own)
        elif not isinstance(kind, str) or (kind := kind.replace("integer", "number")) in kinds:
            return False
        else:
            kinds.add(kind)
    return len(objects) < 2 or any(
        _tells_apart(name, objects, target) for name in sorted(needed(objects[0]))
    )


def _tells_apart(name: str, objects: list[dict[str, Any]], target: Callable[[Any], Any]) -> bool:
    seen: set[str | int] = set()
    for own in objects:
        properties = own.get("properties")
        schema = target(properties.get(name)) if isinstance(properties, dict) else None
        if not isinstance(schema, dict) or name not in (own.get("required") or ()):
            return False
        values = schema.get("enum", [schema["const"]] if "const" in schema else [None])
        is_plain = all(isinstance(value, str) or is_int(value) for value in values)
        if not is_plain or seen & set(values):
            return False
        seen.update(values)
    return True
