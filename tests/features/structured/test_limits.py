"""Grammars that a native library would follow by recursion until its stack ends are refused."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from nanoserve.features.structured.grammar import Source
from nanoserve.features.structured.limits import (
    MOST_BRACKETS,
    MOST_LEVELS,
    MOST_LEVELS_OF_XGRAMMAR,
    MOST_NAMES,
    MOST_NAMES_OF_ONE,
    MOST_RULES,
    _Tree,
    check_bounds,
    check_schema,
)

Link = Callable[[dict[str, Any]], dict[str, Any]]

# How one definition leads to the next.
LINKS: dict[str, Link] = {
    "$ref": lambda ref: ref,
    "items": lambda ref: {"items": ref},
    "properties": lambda ref: {"type": "object", "properties": {"x": ref}},
    "required": lambda ref: {"type": "object", "properties": {"x": ref}, "required": ["x"]},
    "additionalProperties": lambda ref: {"type": "object", "additionalProperties": ref},
    "patternProperties": lambda ref: {"type": "object", "patternProperties": {"^x": ref}},
    "prefixItems": lambda ref: {"type": "array", "prefixItems": [ref]},
    "allOf": lambda ref: {"allOf": [ref]},
    "anyOf": lambda ref: {"anyOf": [{"type": "null"}, ref]},
    "oneOf": lambda ref: {"oneOf": [ref, {"type": "null"}]},
    "not": lambda ref: {"not": ref},
    "if": lambda ref: {"if": {}, "then": ref, "else": ref},
    "$dynamicRef": lambda ref: {"$dynamicRef": ref["$ref"]},
    "nested": lambda ref: {"items": {"items": {"items": {"items": {"items": ref}}}}},
}


def chain(length: int, link: Link, place: str = "$defs") -> dict[str, Any]:
    """Each of `length` definitions leads to the next."""
    definitions = {f"a{i}": link({"$ref": f"#/{place}/a{i + 1}"}) for i in range(length)}
    return {place: definitions | {f"a{length}": {"type": "string"}}, "$ref": f"#/{place}/a0"}


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("place", ["$defs", "definitions", "x-own"])
def test_a_chain_of_references_has_a_bound(name: str, place: str) -> None:
    check_schema(chain(20, LINKS[name], place))
    with pytest.raises(ValueError, match=r"lead \d+ levels deep.*at most 1000 levels are allowed"):
        check_schema(chain(1000, LINKS[name], place))


@pytest.mark.parametrize("name", LINKS)
def test_a_circle_counts_with_all_its_definitions(name: str) -> None:
    """Whoever remembers what he has seen still enters each of them once, within the one before."""
    schema = chain(1000, LINKS[name])
    schema["$defs"]["a1000"] = LINKS[name]({"$ref": "#/$defs/a0"})
    with pytest.raises(ValueError, match="levels deep"):
        check_schema(schema)


def test_definitions_that_all_lead_to_each_other() -> None:
    def schema(number: int) -> dict[str, Any]:
        links = [{"$ref": f"#/$defs/a{i}"} for i in range(number)]
        return {"$defs": {f"a{i}": {"items": {"anyOf": links}} for i in range(number)}, **links[0]}

    check_schema(schema(50))
    with pytest.raises(ValueError, match="levels deep"):
        check_schema(schema(300))


@pytest.mark.parametrize(
    "reference",
    ["#/$defs/a~1b%25/items/0", "#/%24defs/a~1b%25/items/0", "#here", "own#/items/0", "own#here"],
)
def test_references_are_found_however_they_are_written(reference: str) -> None:
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(30):
        deep = {"items": deep}
    deep["$anchor"] = "here"
    schema = {"$defs": {"a/b%": {"$id": "own", "items": [deep]}}, "$ref": reference}
    assert _Tree(schema).deepest() in (1 + 31, 4 + 31 - 1 + 1)


@pytest.mark.parametrize("reference", ["#", "#/$defs/none", "http://elsewhere/a", "#none", "#/a/b"])
def test_what_leads_nowhere_or_to_itself_is_for_the_library_to_refuse(reference: str) -> None:
    check_schema({"$ref": reference, "properties": {"$ref": {"type": "string"}}})


def test_levels_are_those_of_the_longest_walk() -> None:
    def depth(value: Any, root: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value
        below = [depth(one, root) for one in inner if isinstance(one, dict | list)]
        if isinstance(value, dict) and isinstance(value.get("$ref"), str):
            below.append(depth(root["$defs"][value["$ref"].rpartition("/")[2]], root))
        return 1 + max(below, default=0)

    for seed in range(200):
        rng, size = random.Random(seed), seed % 9 + 1
        definitions: dict[str, Any] = {f"a{size}": {"type": "string"}}
        for i in range(size):
            names = [f"a{rng.randint(i + 1, size)}" for _ in range(rng.randint(1, 3))]
            links = [rng.choice([*LINKS.values()])({"$ref": f"#/$defs/{name}"}) for name in names]
            definitions[f"a{i}"] = {"anyOf": links}
        schema = json.loads(json.dumps({"$defs": definitions, "$ref": "#/$defs/a0"}))
        for found in _dictionaries(schema):
            found.pop("$dynamicRef", None)
        assert _Tree(schema).deepest() == depth(schema, schema)


def _dictionaries(value: Any) -> list[dict[str, Any]]:
    inner = value.values() if isinstance(value, dict) else value
    own = [value] if isinstance(value, dict) else []
    return own + [d for one in inner if isinstance(one, dict | list) for d in _dictionaries(one)]


@pytest.mark.parametrize("name", ["properties", "patternProperties", "required"])
def test_names_have_a_bound(name: str) -> None:
    def schema(*counts: int) -> dict[str, Any]:
        names = [[f"p{i}" for i in range(count)] for count in counts]
        as_needed = [one if name == "required" else {key: {} for key in one} for one in names]
        return {"anyOf": [{"type": "object", name: one} for one in as_needed]}

    check_schema(schema(MOST_NAMES_OF_ONE, MOST_NAMES_OF_ONE, MOST_NAMES - 2 * MOST_NAMES_OF_ONE))
    with pytest.raises(ValueError, match=f"one of its '{name}' has 2001 names; at most 2000"):
        check_schema(schema(5, MOST_NAMES_OF_ONE + 1))
    with pytest.raises(ValueError, match=f"6000 names in all of its '{name}' together"):
        check_schema(schema(1500, 1500, 1500, 1500))


def test_xgrammar_is_asked_for_less() -> None:
    source = Source("json", json.dumps(chain(400, LINKS["$ref"])))
    check_bounds(source, "guidance")
    with pytest.raises(ValueError, match=f"at most {MOST_LEVELS_OF_XGRAMMAR} levels are allowed"):
        check_bounds(source, "xgrammar")
    assert MOST_LEVELS_OF_XGRAMMAR < MOST_LEVELS


def test_schemas_within_tags_and_grammars_are_looked_at() -> None:
    deep = chain(2000, LINKS["items"])
    tag = {"structures": [{"begin": "<a>", "schema": deep, "end": "</a>"}], "triggers": ["<"]}
    with pytest.raises(ValueError, match="levels deep"):
        check_bounds(Source("structural_tag", json.dumps(tag)), "guidance")
    for header in ("", "%llguidance {}\n"):
        text = f'{header}start: "x" %json{json.dumps(deep)} "y"'
        with pytest.raises(ValueError, match="levels deep"):
            check_bounds(Source("grammar", text), "guidance")
    with pytest.raises(ValueError, match="the text after %json is not JSON"):
        check_bounds(Source("grammar", 'start: %json {"a": '), "guidance")


@pytest.mark.parametrize(
    ("first", "rule"),
    [
        ("start: a0", "a{0}: a{1}"),
        ("start: A0", "A{0}: A{1}"),
        ("start: a0", "?a{0} : a{1}"),
        ("start: a0", "!a{0}.2: a{1}"),
        ("start: a0", "a{0}[lazy]: a{1}"),
        ("root ::= a0", "a{0} ::= a{1}"),
        ("root ::= a-0", "a-{0}::= a-{1}"),
    ],
)
def test_rules_have_a_bound(first: str, rule: str) -> None:
    def grammar(number: int) -> Source:
        return Source(
            "grammar", "\n".join([first, *(rule.format(i, i + 1) for i in range(number))])
        )

    check_bounds(grammar(MOST_RULES - 1), "guidance")
    with pytest.raises(ValueError, match=f"{MOST_RULES + 1} rules; at most {MOST_RULES}"):
        check_bounds(grammar(MOST_RULES), "guidance")


def test_brackets_have_a_bound() -> None:
    nested = "start: " + "(" * (MOST_BRACKETS + 1) + '"a"' + ")" * (MOST_BRACKETS + 1)
    with pytest.raises(ValueError, match="501 brackets open at the same time"):
        check_bounds(Source("grammar", nested), "guidance")
    check_bounds(Source("grammar", "start: " + '("a")' * 5000), "guidance")
