"""Rewrite JSON schemas into keywords that grammar libraries support.

Many keywords constrain nothing, such as annotations, undefined formats, and keywords at their
neutral values. They are removed before a library sees the schema. A keyword that constrains values
but cannot be enforced is rejected with an error that names it, or ignored in lenient mode. Without
ignored keywords, every value that is valid under the result is valid under the original schema.
"""

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from nanoserve.features.structured import schema_keywords as keywords
from nanoserve.features.structured.schema_keywords import Unsupported, assertions_of
from nanoserve.features.structured.schema_numbers import (
    BOUNDS,
    OpenBounds,
    check_common_multiples,
    check_multiple,
    check_values,
    checked_bound,
)
from nanoserve.features.structured.schema_references import (
    References,
    check_circles,
    reference_of,
    walk,
)
from nanoserve.features.structured.schema_unions import are_disjoint, closing, only_requires
from nanoserve.utils.checks import require, shown

logger = logging.getLogger(__name__)

_Path = tuple[Any, ...]  # (path of the parent, key), or () at the root
_MOST_PARTS = 200_000  # schemas and enum values of one rewritten schema, which references multiply
_MOST_NAMED = 8  # ignored keywords that a log line names
_BY_NAME = ("properties", "patternProperties")
_ONE = ("items", "additionalItems", "additionalProperties")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_MEETING = (
    *("properties", "patternProperties", "additionalProperties", "required"),
    *("minProperties", "maxProperties", "items", "prefixItems", "additionalItems"),
)


@lru_cache(maxsize=16)
def rewritten(text: str, closes: bool, is_lenient: bool) -> str:
    """Return a JSON schema, as a string, rewritten with keywords that the libraries support.

    closes: if True, objects that name properties have no others unless the schema allows them, and
    arrays that name their first items have no further ones. is_lenient: if True, keywords that
    cannot be enforced are ignored and logged; otherwise they raise `ValueError`, which names the
    keyword and its location.
    """
    rewriter = _Rewriter(json.loads(text), is_lenient)
    schema = rewriter.whole(closes)
    if rewriter.ignored:
        named = ", ".join(rewriter.ignored[:_MOST_NAMED])
        others = len(rewriter.ignored) - _MOST_NAMED
        logger.warning("lenient: ignored %s%s", named, f" and {others} more" * (others > 0))
    return json.dumps(schema)


class _Rewriter:
    """Rewrites one schema. Recursion follows its nesting; references are followed in a loop."""

    def __init__(self, root: Any, is_lenient: bool) -> None:
        self._root, self._is_lenient = root, is_lenient
        self._references = References(root)
        self._open_bounds = OpenBounds(walk(root))
        self._multiples: set[Any] = set()
        self._num_parts = 0
        self._steps: tuple[Callable[[dict[str, Any]], None], ...] = (
            keywords.drop_foreign,
            keywords.replace_conditions,
            keywords.replace_dependents,
            keywords.replace_unevaluated,
            self._replace_names,
            keywords.replace_in_arrays,
            keywords.replace_in_strings,
            keywords.replace_counts,
            self._check_numbers,
        )
        self.ignored: list[str] = []  # keywords and their locations

    def whole(self, closes: bool) -> dict[str, Any]:
        """Rewrite the root schema and all definitions that it refers to."""
        made = self.schema(self._root, (), closes)
        schema = made if isinstance(made, dict) else {"allOf": [made]}
        schema = keywords.dialect_of(self._root) | schema
        definitions: dict[str, Any] = {}
        waiting = self._references.waiting
        while waiting:
            name, reference, target, closes_it = waiting.popleft()
            definitions[name] = self.schema(target, ((), reference.lstrip("#/")), closes_it)
        check_common_multiples(self._multiples)
        check_circles(definitions)
        return schema | ({"$defs": definitions} if definitions else {})

    def schema(self, value: Any, path: _Path, closes: bool) -> Any:
        """Rewrite one schema and its subschemas."""
        if isinstance(value, bool):
            return value
        require(isinstance(value, dict), f"{shown(value)} at {_shown(path)} is not a schema")
        self._count(1)
        own = assertions_of(value)
        for step in self._steps:
            self._try(step, own, path)
        if "allOf" in own and own["allOf"] == []:
            del own["allOf"]
        if own.keys() == {"allOf"} and len(own["allOf"]) == 1:
            return self.schema(own["allOf"][0], (path, "allOf/0"), closes)
        return self._with_parts(own, path, closes)

    def _try(
        self, step: Callable[[dict[str, Any]], None], own: dict[str, Any], path: _Path
    ) -> None:
        """Run a step. In lenient mode, repeat it without each keyword that it does not support."""
        while True:
            try:
                return step(own)
            except Unsupported as error:
                if not self._is_lenient:
                    message = f"{error}, at {_shown(path)}; lenient=True ignores it"
                    raise ValueError(message) from None
                self.ignored.append(f"{error.keyword} at {_shown(path)}")
                own.pop(error.keyword, None)
            except (TypeError, AttributeError, ValueError) as error:
                raise ValueError(f"{error}, at {_shown(path)}") from None

    def _with_parts(self, own: dict[str, Any], path: _Path, closes: bool) -> dict[str, Any]:
        """Rewrite the subschemas of a schema, and close it where that excludes nothing it requires.

        Schemas that apply to the same value, such as the branches of allOf, are left open: each
        would exclude the properties of the others.
        """
        draft_is_old = "$schema" in self._root and "2020" not in str(self._root["$schema"])
        applied = [
            name for name in keywords.APPLICATORS if name in own and not only_requires(own, name)
        ]
        is_meeting = len(applied) > 1 or any(name in own for name in _MEETING)
        closes_branches = closes and not is_meeting and "allOf" not in own
        if closes and not applied:
            own |= closing(own, draft_is_old)
        if "oneOf" in own and closes_branches:
            closes_branches = are_disjoint(own["oneOf"], self._target)
        if "oneOf" in own and len(own["oneOf"]) > 1 and (self._is_lenient or closes_branches):
            if not closes_branches and not are_disjoint(own["oneOf"], self._target):
                self.ignored.append(f"that only one schema of oneOf is valid at {_shown(path)}")
            if "anyOf" in own:
                own["allOf"] = [*own.get("allOf", []), {"anyOf": own["oneOf"]}]
            else:
                own["anyOf"] = own["oneOf"]
            del own["oneOf"]
        made: dict[str, Any] = {}
        for name, value in own.items():
            inner = closes_branches if name in keywords.APPLICATORS else closes and not applied
            made[name] = self._part(name, value, (path, name), inner)
        return made

    def _part(self, name: str, value: Any, path: _Path, closes: bool) -> Any:
        """Rewrite the value of one keyword."""
        if name in _BY_NAME and isinstance(value, dict):
            return {key: self.schema(one, (path, key), closes) for key, one in value.items()}
        if name in _SEVERAL or (name == "items" and isinstance(value, list)):
            problem = f"must be a list of schemas, not {type(value).__name__}"
            require(isinstance(value, list), f"{_shown(path)} {problem}")
            return [self.schema(one, (path, i), closes) for i, one in enumerate(value)]
        if name in _ONE:
            return self.schema(value, path, closes)
        if name == "$ref":
            try:
                reference, target = self._references.target(value, _is_alias)
            except ValueError as error:
                raise ValueError(f"{error}, at {_shown(path[0])}") from None
            return f"#/$defs/{self._references.name(reference, target, closes)}"
        return value

    def _count(self, num_parts: int) -> None:
        self._num_parts += num_parts
        message = f"its references expand it to more than {_MOST_PARTS} schemas and values"
        require(self._num_parts <= _MOST_PARTS, message)

    def _replace_names(self, own: dict[str, Any]) -> None:
        reference = reference_of(own)
        for name in ("$dynamicRef", "$recursiveRef"):
            own.pop(name, None)
        if reference is not None:
            own["$ref"] = reference
        if "propertyNames" in own:
            keywords.replace_names(own, self._target(own["propertyNames"]))

    def _target(self, schema: Any) -> Any:
        """Return a schema, or the schema of which it is an alias."""
        if isinstance(schema, dict) and _is_alias(schema):
            return self._references.target(reference_of(schema), _is_alias)[1]
        return schema

    def _check_numbers(self, own: dict[str, Any]) -> None:
        if "const" in own or "enum" in own:
            self._count(check_values([own.get("const"), own.get("enum")]))
        for name in BOUNDS:
            if name in own:
                try:
                    own[name] = self._open_bounds.moved(name, checked_bound(name, own[name]))
                except ValueError as error:
                    raise Unsupported(name, str(error).removeprefix(name)) from None
        if "multipleOf" in own:
            try:
                self._multiples.add(check_multiple(own["multipleOf"]))
            except ValueError as error:
                raise Unsupported("multipleOf", str(error).removeprefix("multipleOf")) from None


def _is_alias(schema: dict[str, Any]) -> bool:
    own = assertions_of(schema)
    return len(own) == 1 and reference_of(own) is not None


def _shown(path: _Path) -> str:
    """Return a path as a JSON pointer. Paths are kept as chains, since most are never written."""
    keys: list[str] = []
    while path:
        path, key = path
        keys.append(str(key))
    return shown("/".join(["#", *reversed(keys)])).strip("'")


# llguidance's options for JSON with exactly one space after each comma and colon.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: str, options: dict[str, Any]) -> str:
    """Return the right-hand side of a Lark rule for JSON that is valid under a schema.

    schema: a JSON object, as a string. options: llguidance's, such as `COMPACT`.
    """
    rest = schema.lstrip()[1:].lstrip()
    own = json.dumps({"x-guidance": options})[:-1]
    return f"%json {own}{', ' if rest != '}' else ''}{rest}"
