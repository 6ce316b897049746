"""Resolve the references within a JSON schema to the schemas that they refer to."""

from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from nanoserve.utils.checks import require, shown

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def walk(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield each object within a schema, without recursion."""
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


def reference_of(schema: dict[str, Any]) -> Any:
    """Return the reference of a schema, or None.

    The schema is a single document, so a dynamic reference has one target, like a plain reference.
    """
    return next((schema[name] for name in REFERENCES if schema.get(name) is not None), None)


def keys_of(pointer: str) -> list[str]:
    """Return the keys of a JSON pointer, from the root down: "/a~1b/0" has ["a/b", "0"]."""
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


class References:
    """The targets of the references in `root`, and their names in the rewritten schema.

    Each target gets a name among the definitions of the rewritten schema. It gets two if it is
    closed (allows no further properties) for one reference and open for another.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._id = root.get("$id") or root.get("id")
        self._named: dict[str, Any] | None = None  # by anchor and $id
        self._targets: dict[str, tuple[str, Any]] = {}  # by reference, with aliases resolved
        self._names: dict[tuple[str, bool], str] = {}
        self._taken: set[str] = set()
        self.waiting: deque[tuple[str, str, Any, bool]] = deque()  # name, reference, target, closes

    def target(self, reference: Any, is_alias: Any) -> tuple[str, Any]:
        """Return the final reference and its schema, following definitions that are aliases.

        is_alias: returns True for a schema that only refers to another schema. Raises
        `ValueError` if a reference has no target, or if aliases form a circle.
        """
        seen: dict[str, None] = {}
        text = reference
        while True:
            if not isinstance(text, str):
                raise ValueError(f"$ref={shown(text)} must be a string")
            found = self._targets.get(text)
            if found is not None:
                break
            if text in seen:
                raise ValueError(f"$ref={shown(reference)} refers to itself in a circle")
            seen[text] = None
            target = self._resolve(text)
            if not (isinstance(target, dict) and is_alias(target)):
                found = text, target
                break
            text = reference_of(target)
        for text in seen:
            self._targets[text] = found
        return found

    def name(self, reference: str, target: Any, closes: bool) -> str:
        """Return the name of a target among the definitions of the rewritten schema."""
        name = self._names.get((reference, closes))
        if name is None:
            last = reference.rpartition("/")[2].strip("#")
            base = "".join(c if c.isalnum() or c in "_.-" else "_" for c in last)[:64] or "root"
            name, number = base, 1
            if name in self._taken:
                number = len(self._taken)
                while (name := f"{base}.{number}") in self._taken:
                    number += 1
            self._taken.add(name)
            self._names[reference, closes] = name
            self.waiting.append((name, reference, target, closes))
        return name

    def _resolve(self, reference: str) -> Any:
        base, _, pointer = reference.partition("#")
        if base and base != self._id and base not in self._others():
            raise ValueError(
                f"$ref={shown(reference)} is not within the schema; include it under $defs"
            )
        value = self._root if not base or base == self._id else self._others()[base]
        if pointer and not pointer.startswith("/"):
            if f"#{pointer}" not in self._others():
                raise ValueError(f"$ref={shown(reference)} has no target: there is no such anchor")
            return self._others()[f"#{pointer}"]
        steps = pointer.split("/")[1:] if pointer != "/" else []
        for step, key in zip(steps, keys_of(pointer), strict=False):
            if isinstance(value, dict) and (key in value or step in value):
                value = value[key if key in value else step]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise ValueError(f"$ref={shown(reference)} has no target: there is no {shown(key)}")
        return value

    def _others(self) -> dict[str, Any]:
        """Return the schemas that have an anchor or an `$id`, by that name."""
        if self._named is None:
            self._named = {}
            for schema in walk(self._root):
                for name, prefix in (("$id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
                    if isinstance(text := schema.get(name), str):
                        self._named.setdefault(prefix + text, schema)
        return self._named


def check_circles(definitions: dict[str, Any]) -> None:
    """Raise `ValueError` if definitions are aliases of each other in a circle."""
    checked: set[str] = set()
    for start, schema in definitions.items():
        seen, name = {start}, start
        while isinstance(schema, dict) and schema.keys() == {"$ref"} and name not in checked:
            checked.add(name)
            name = schema["$ref"].removeprefix("#/$defs/")
            require(name not in seen, f"$ref to {shown(name)} refers to itself in a circle")
            seen.add(name)
            schema = definitions[name]
