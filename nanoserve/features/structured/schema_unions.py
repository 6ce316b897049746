"""Find out which schemas may be closed to further properties, and which are disjoint."""

from collections.abc import Callable
from typing import Any

from nanoserve.features.structured.schema_keywords import assertions_of
from nanoserve.utils.checks import is_int


def closing(own: dict[str, Any], draft_is_old: bool) -> dict[str, Any]:
    """Return the keywords that exclude properties and items which a schema does not describe.

    They are returned only if the schema does not say itself whether it allows them. An object
    without any named properties stays open, as it stands for any object. So does one that requires
    a property which it does not describe.
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
    """Return the properties that a schema requires, also in branches of nothing but `required`."""
    names = set(own.get("required") or ())
    for name in ("allOf", "anyOf", "oneOf"):
        if name in own and only_requires(own, name):
            names.update(*(branch.get("required", ()) for branch in own[name]))
    return names


def only_requires(own: dict[str, Any], name: str) -> bool:
    """Return True if the branches of a keyword have no other keyword than `required`."""
    branches = own[name]
    return isinstance(branches, list) and all(
        isinstance(branch, dict) and assertions_of(branch).keys() == {"required"}
        for branch in branches
    )


def are_disjoint(branches: Any, target: Callable[[Any], Any]) -> bool:
    """Return True if evidently no value is valid under two of these schemas.

    This is so if their types differ, and objects all require a property with different values.
    target: returns the schema that a schema is an alias of, or the schema itself.
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
        _distinguishes(name, objects, target) for name in sorted(needed(objects[0]))
    )


def _distinguishes(name: str, objects: list[dict[str, Any]], target: Callable[[Any], Any]) -> bool:
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
