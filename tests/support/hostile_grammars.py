"""Grammars that somebody sends who means no good, or does not know better."""

import json
from typing import Any


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"p": schema}, "required": ["p"]}
    return schema


def _doubling(depth: int) -> dict[str, Any]:
    """2^depth objects, in a few lines."""
    definitions: dict[str, Any] = {f"n{depth}": {"type": "null"}}
    for number in range(depth):
        ref = {"$ref": f"#/$defs/n{number + 1}"}
        definitions[f"n{number}"] = {
            "type": "object",
            "properties": {"a": ref, "b": ref},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    return {"$defs": definitions, "$ref": "#/$defs/n0"}


def _all_of(width: int) -> dict[str, Any]:
    """5^width ways to be right."""
    branches = [
        {"anyOf": [{"properties": {f"k{i}_{j}": {"type": "integer"}}} for j in range(5)]}
        for i in range(width)
    ]
    return {"allOf": branches}


def _open_object(width: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(width)}}


def hostile_grammars() -> dict[str, dict[str, Any]]:
    """By what they are."""
    deep_text = '{"p": ' * 5000 + "1" + "}" * 5000
    return {
        "1 MB of regex": {"regex": "ab" * 2**19},
        "10^6 choices": {"choice": [f"choice {i}" for i in range(10**6)]},
        "10^4 choices": {"choice": [f"choice number {i}" for i in range(10**4)]},
        "5 MB of schema": {"json": {"description": "x" * 5 * 10**6}},
        "a schema 5000 deep": {"json": deep_text},
        "a schema 80 deep": {"json": _nested(40)},
        "2^40 objects": {"json": _doubling(40)},
        "5^8 ways": {"json": _all_of(8)},
        "an enum of 30,000": {"json": {"enum": [f"value number {i}" for i in range(30_000)]}},
        "3,000 optional properties": {"json": _open_object(3000)},
        "a schema that is itself": {"json": {"$ref": "#"}},
        "a circle": {
            "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
            | {"$ref": "#/$defs/a"}
        },
        "10^9 items": {"json": {"type": "array", "items": {"type": "null"}, "minItems": 10**9}},
        "10^9 letters": {"json": {"type": "string", "minLength": 10**9}},
        "a pattern in a schema": {"json": {"type": "string", "pattern": "^(([a-z]+)+)+$"}},
        "loops in loops": {"regex": "((a{0,1000}){0,1000}){0,1000}"},
        "a?^n a^n": {"regex": "(a?){2000}a{2000}"},
        "2^300 states": {"regex": ".*a.{300}"},
        "letters of all scripts": {"regex": r"\p{L}{1,5000}"},
        "a long alternative": {"regex": "|".join("x" * i for i in range(150))},
        "an ambiguous grammar": {"grammar": 'start: s\ns: s s | "a" | ""'},
        "10^4 rules": {"grammar": "\n".join(f's{i}: "a" s{i + 1}?' for i in range(10**4))},
        "brackets": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
        "GBNF": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
        "10^3 structures": {
            "structural_tag": json.dumps(
                {
                    "structures": [
                        {"begin": f"<f{i}>", "schema": {"type": "object"}, "end": "</f>"}
                        for i in range(1000)
                    ],
                    "triggers": ["<f"],
                }
            )
        },
    }
