"""Schemas as programs write them are taken, and obeyed as they were given, or refused by name."""

import json
import logging
import random
import time
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
pytest.importorskip("jsonschema", reason="pip install jsonschema")
import jsonschema
from llguidance import LLMatcher, LLTokenizer

from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.guidance import to_llguidance
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.features.structured.schemas import rewritten

BYTES = LLTokenizer("byte")
STRING: dict[str, Any] = {"type": "string"}
ONE = {"enum": [1, 2]}


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def matcher(schema: Any, **options: Any) -> LLMatcher:
    params = StructuredOutputsParams(json=schema, **options)
    made = LLMatcher(BYTES, to_llguidance(params.source(StructuredOutputsConfig())), log_level=0)
    if made.is_error():
        raise ValueError(made.get_error())
    return made


def walk(start: LLMatcher, rng: random.Random, most: int = 300) -> str | None:
    """Return what a model of random logits would say, None if it came to no end."""
    grammar, text = start.deep_copy(), bytearray()
    for _ in range(most):
        bits = np.unpackbits(np.frombuffer(grammar.compute_bitmask(), np.uint8), bitorder="little")
        choices = [i for i in np.flatnonzero(bits).tolist() if i != BYTES.eos_token]
        if grammar.is_accepting() and (not choices or rng.random() < 0.3):
            return text.decode(errors="replace")
        assert choices, bytes(text)
        closing = [i for i in choices if i in b'"}],']
        text.append(rng.choice(closing if closing and rng.random() < 0.3 else choices))
        assert grammar.consume_token(text[-1])
    return None


def takes(start: LLMatcher, text: str) -> bool:
    grammar = start.deep_copy()
    return all(grammar.try_consume_tokens([b]) for b in text.encode()) and grammar.is_accepting()


def made(schema: dict[str, Any], closes: bool = True, is_lenient: bool = False) -> Any:
    return json.loads(rewritten(json.dumps(schema), closes, is_lenient))


ANNOTATIONS: list[dict[str, Any]] = [
    *(STRING | {"format": name} for name in ("password", "binary", "path", "base64", "x")),
    {"type": "integer", "format": "int32"},
    {"format": ["odd"]},
    {"propertyNames": STRING},
    {"propertyNames": {"type": ["string", "null"], "description": "a name"}},
    {"propertyNames": True, "patternProperties": {}, "minProperties": 0},
    {"contentEncoding": "base64", "contentMediaType": "a/b", "contentSchema": {"not": {}}},
    {"$anchor": "x", "$vocabulary": {}, "$comment": "", "$dynamicAnchor": "y", "id": "z"},
    {"discriminator": {}, "xml": {}, "externalDocs": {}, "example": 1, "nullable": True},
    {"deprecated": True, "readOnly": True, "writeOnly": True, "title": 5, "examples": 1},
    {"x-order": 1, "x-guidance": {"lenient": True}, "strict": True, "propertyOrdering": ["a"]},
    {"uniqueItems": False, "minItems": 0, "minContains": 3, "maxContains": 1},
    {"type": "array", "contains": STRING, "minContains": 0},
    {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    {"dependentRequired": {"a": []}, "dependentSchemas": {"a": {"title": "x"}}},
    {"not": False},
    {"if": STRING},
    {"then": STRING, "else": STRING},
    {"if": STRING, "then": True, "else": {"title": "x"}},
    {"unevaluatedProperties": True, "unevaluatedItems": {}, "additionalItems": False},
    {"required": None, "maximum": None, "properties": None, "description": None},
    STRING | {"uniqueItems": True, "contains": {}, "minimum": "x", "dependentRequired": {"a": "b"}},
]


@pytest.mark.parametrize("schema", ANNOTATIONS)
def test_what_asks_for_nothing_is_dropped(schema: dict[str, Any]) -> None:
    told = made(schema)
    assert told.keys() <= {"type", "minItems", "minProperties", "patternProperties"}, told
    matcher(schema)
    matcher({"type": "array", "items": schema, "maxItems": 1})


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"contains": {"const": 1}},
    "not": {"not": STRING},
    "if": {"if": STRING, "then": {"maxLength": 1}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "propertyNames": {"properties": {"a": {}}, "propertyNames": {"pattern": "^x"}},
    "unevaluatedProperties": {"allOf": [{}, {"type": "object"}], "unevaluatedProperties": False},
    "pattern": {"type": "string", "pattern": "^(?!foo)[a-z]{3}$"},
    "multipleOf": {"multipleOf": 0.07},
    "minimum": {"minimum": 2**53 + 1},
}


@pytest.mark.parametrize("name", list(UNSUPPORTED))
def test_what_cannot_be_obeyed_is_refused_or_ignored_by_name(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    schema = object_of(a=UNSUPPORTED[name])
    with pytest.raises(ValueError, match=rf"^{name}.* at #/properties/a; lenient=True"):
        made(schema)
    rewritten.cache_clear()
    with caplog.at_level(logging.WARNING, "nanoserve"):
        told = made(schema, is_lenient=True)
    assert f"ignored {name} at #/properties/a" in caplog.text
    assert name not in told["properties"]["a"]
    matcher(schema, lenient=True)


def test_one_of_several_is_any_of_them_if_that_will_do(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(ValueError, match="oneOf"):
        matcher(schema)
    rewritten.cache_clear()
    with caplog.at_level(logging.WARNING, "nanoserve"):
        assert takes(matcher(schema, lenient=True), "1")
    assert "oneOf" in caplog.text


SAME = [
    ({"not": {}}, {"allOf": [False]}),
    ({"if": True, "then": STRING}, STRING),
    ({"allOf": [{"$ref": "#/$defs/a~1b%20c"}], "$defs": {"a/b c": ONE}}, None),
    ({"$ref": "#/components/schemas/A", "components": {"schemas": {"A": ONE}}}, None),
    ({"$ref": "#here", "x": {"$anchor": "here"} | ONE}, None),
    ({"$dynamicRef": "#here", "x": {"$dynamicAnchor": "here"} | ONE}, None),
    ({"$id": "http://e.org/s", "$ref": "http://e.org/s#/$defs/a", "$defs": {"a": ONE}}, None),
    ({"$ref": "#/$defs/b", "$defs": {"a": ONE, "b": {"$ref": "#/$defs/a"}}}, None),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
    ({"contains": {}, "maxItems": 3.0}, {"minItems": 1, "maxItems": 3}),
    (
        {"required": ["a"], "dependentRequired": {"x": ["a"]}},
        {"required": ["a"]},
    ),
    (
        {"propertyNames": {"enum": ["a"]}, "additionalProperties": ONE},
        {"properties": {"a": ONE}, "additionalProperties": False},
    ),
    (
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": ONE},
        {"patternProperties": {"^a": ONE}, "additionalProperties": False},
    ),
    ({"type": "object", "unevaluatedProperties": False}, None),
]


@pytest.mark.parametrize(("schema", "expected"), SAME)
def test_what_can_be_said_in_other_words_is(schema: Any, expected: Any) -> None:
    told = made(schema)
    if expected is not None:
        assert told == expected
    elif "$defs" in told:
        ((name, definition),) = told["$defs"].items()
        assert definition == ONE and told["$ref"] == f"#/$defs/{name}"
    else:
        assert told == {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "circle"),
        ({"$ref": "#"}, "circle"),
        ({"allOf": [{"$ref": "#"}]}, "circle"),
        ({"$ref": "#/$defs/none"}, "has no target"),
        ({"$ref": "http://e.org/s"}, "not within"),
        ({"$ref": 5}, "must be a string"),
        ({"items": 5}, "5 at #/items is not a schema"),
        ({"anyOf": {}}, "#/anyOf must be a list"),
    ],
)
def test_what_is_no_schema_is_refused(schema: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        made(schema)


OPEN = {"type": "object", "properties": {"a": ONE}}
CLOSED = OPEN | {"additionalProperties": False}
CLOSINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (OPEN, CLOSED),
    ({"type": "object"}, {"type": "object"}),
    (OPEN | {"additionalProperties": True}, OPEN | {"additionalProperties": True}),
    ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
    ({"properties": {"properties": OPEN}} | {"additionalProperties": {}}, {}),
    ({"required": ["b"], **OPEN}, {"required": ["b"], **OPEN}),
    ({"minProperties": 2, **OPEN}, {"minProperties": 2, **OPEN}),
    ({"allOf": [OPEN, OPEN]}, {"allOf": [OPEN, OPEN]}),
    ({"allOf": [OPEN]}, CLOSED),
    ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    ({"anyOf": [OPEN], "properties": {"b": OPEN}}, {"anyOf": [OPEN], "properties": {"b": OPEN}}),
    (
        {"anyOf": [{"required": ["a"]}], "properties": {"a": OPEN}},
        {
            "anyOf": [{"required": ["a"]}],
            "properties": {"a": CLOSED},
            "additionalProperties": False,
        },
    ),
    ({"oneOf": [OPEN, STRING]}, {"anyOf": [CLOSED, STRING]}),
    ({"oneOf": [OPEN, {"type": "object"}]}, {"oneOf": [OPEN, {"type": "object"}]}),
    (
        {"patternProperties": {"^x": ONE}},
        {"patternProperties": {"^x": ONE}, "additionalProperties": False},
    ),
    ({"prefixItems": [ONE]}, {"prefixItems": [ONE], "items": False}),
    ({"prefixItems": [ONE], "minItems": 2}, {"prefixItems": [ONE], "minItems": 2}),
    ({"items": [ONE]}, {"items": [ONE], "additionalItems": False}),
    ({"const": OPEN}, {"const": OPEN}),
]


@pytest.mark.parametrize(("schema", "expected"), CLOSINGS)
def test_objects_are_closed_where_that_takes_nothing_away(schema: Any, expected: Any) -> None:
    if expected:
        assert made(schema) == expected
    else:
        assert made(schema)["properties"]["properties"] == CLOSED
    assert "additionalProperties" not in made(OPEN, closes=False)


def test_a_definition_may_be_closed_at_one_place_and_open_at_another() -> None:
    name = {"$ref": "#/$defs/o"}
    told = made(
        {"prefixItems": [name, {"allOf": [name, {"required": ["b"]}]}], "$defs": {"o": OPEN}}
    )
    first, second = told["prefixItems"]
    definitions = {f"#/$defs/{key}": value for key, value in told["$defs"].items()}
    assert definitions[first["$ref"]] == CLOSED
    assert definitions[second["allOf"][0]["$ref"]] == OPEN


def exact(value: Any) -> Fraction:
    return Fraction(Decimal(repr(value)))


def is_within(text: str, schema: dict[str, Any]) -> bool:
    """Compare as the decimal numbers that are written, where jsonschema would round them first."""
    value, bounds = Fraction(Decimal(text)), {k: v for k, v in schema.items() if k != "type"}
    checks = {
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "exclusiveMaximum": lambda bound: value < bound,
        "multipleOf": lambda step: (value / step).denominator == 1,
        "const": lambda constant: value == constant,
    }
    is_integer = schema.get("type") != "integer" or value.denominator == 1
    return is_integer and all(checks[name](exact(bound)) for name, bound in bounds.items())


def bounds_of(rng: random.Random) -> dict[str, Any]:
    low = rng.choice([0, 0, 1, -1, 0.5, -0.25, 2**53 - 1, 10**12, 1e-7, 4e-16, rng.randint(-9, 9)])
    high = low + rng.choice([4e-16, 0.5, 0.25, 1, 3, 0.1])
    schema = {"type": rng.choice(["number", "integer"])}
    schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
    return schema


def test_numbers_are_within_their_bounds(by_size: Callable[..., int]) -> None:
    rng, num_obeyed = random.Random(1), 0
    for _ in range(by_size(40, 400)):
        schema = bounds_of(rng)
        try:
            grammar = matcher(schema)
        except ValueError:
            continue
        texts = [walk(grammar, rng) for _ in range(3)]
        for bound in schema.values():
            for text in (str(bound), f"-{bound}", f"{bound}.0", "0", "-0"):
                if text.lstrip("-").replace(".", "", 1).isdigit() and takes(grammar, text):
                    texts.append(text)
        for text in filter(None, texts):
            assert is_within(text, schema), (schema, text)
            num_obeyed += 1
    assert num_obeyed > by_size(40, 400)


@pytest.mark.parametrize(
    "value",
    [
        *(2**53, 2**60, -(2**60), 2**53 + 2, 0.1, -0.5, 1e2, 1e22, 4e-16, 1e-300),
        *(0.30000000000000004, 8.949149306794206e-10, 0.10774190202629219),
        *(-4.7182903198747515e-20, 123456789.12345678),
    ],
)
def test_constants_come_out_as_they_went_in(value: float) -> None:
    for schema in ({"const": value}, {"enum": [value]}, object_of(a={"const": value})):
        told = json.loads(walk(matcher(schema), random.Random(0), 600))
        told = told["a"] if isinstance(told, dict) else told
        assert told == value and (isinstance(value, float) or type(told) is int)


@pytest.mark.parametrize(
    "schema",
    [
        *({"const": value} for value in (2**53 + 1, 2**63, 2**64 - 1, -(2**63), 10**400)),
        {"enum": [1, {"a": [9007199254740993]}]},
        {"const": 1e300},
        {"const": 1e23},
        {"maximum": 1.2345678901234568e18},
        *({"type": "integer", name: 2**53 + 1} for name in ("minimum", "maximum")),
        *({"type": "integer", f"exclusive{name}": 2**60} for name in ("Minimum", "Maximum")),
        {"type": "integer", "maximum": 2**64 - 1},
        {"type": "number", "maximum": 1e300},
        {"minimum": True},
        *({"multipleOf": value} for value in (0, -2, 2**32, 0.07, 1e-20, "2", True)),
        {"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]},
    ],
)
def test_numbers_that_would_become_others_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\d|True"):
        made(schema)


def test_the_bounds_of_int64_are_taken() -> None:
    grammar = matcher({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    assert takes(grammar, str(2**63 - 1)) and takes(grammar, str(-(2**63) + 1024))
    assert not takes(grammar, str(2**63)) and not takes(grammar, str(-(2**63) - 1))


REAL: dict[str, dict[str, Any]] = {
    "zod email": STRING
    | {
        "format": "email",
        "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@"
        "([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
        "maxLength": 24,
    },
    "zod duration": STRING
    | {
        "format": "duration",
        "pattern": "^P(?:(\\d+W)|(?!.*W)(?=\\d|T\\d)(\\d+Y)?(\\d+M)?(\\d+D)?"
        "(T(?=\\d)(\\d+H)?(\\d+M)?(\\d+([.,]\\d+)?S)?)?)$",
        "maxLength": 9,
    },
    "zod time": STRING
    | {"format": "time", "pattern": "^(?:[01]\\d|2[0-3]):[0-5]\\d(?::[0-5]\\d)?$"},
    "zod startsWith": STRING | {"format": "starts_with", "pattern": "^ab.*", "maxLength": 5},
    "zod record": {"type": "object", "propertyNames": STRING, "additionalProperties": ONE},
    "zod record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": ONE,
        "required": ["a", "b"],
    },
    "zod never": {"type": "object", "properties": {"a": {"not": {}}, "b": ONE}, "required": ["b"]},
    "zod tuple": {"type": "array", "prefixItems": [ONE, {"type": "null"}], "minItems": 2},
    "discriminated": {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            "A": object_of(kind={"const": "a"}, one=ONE),
            "B": object_of(kind={"const": "b"}, two=ONE),
        },
    },
    "discriminated by a number": {
        "oneOf": [object_of(a=ONE), object_of(a={"enum": [3]}, b=ONE)],
    },
    "allOf": {"allOf": [object_of(a=ONE), object_of(b={"type": "null"})], "maxProperties": 2},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": object_of(
                value=ONE, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
            )
        },
    },
    "root": object_of(more={"type": "array", "items": {"$ref": "#"}, "maxItems": 1}),
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [ONE, ONE],
        "prefixItems": [STRING],
        "type": "array",
        "minItems": 1,
    },
}


@pytest.mark.parametrize("name", list(REAL))
def test_outputs_validate_against_the_schema_that_was_given(
    name: str, by_size: Callable[..., int]
) -> None:
    schema, rng, num_ended = REAL[name], random.Random(name), 0
    grammar, check = matcher(schema), jsonschema.validators.validator_for(schema)(schema)
    for _ in range(by_size(10, 60)):
        text = walk(grammar, rng)
        if text is not None:
            check.validate(json.loads(text))
            num_ended += 1
    assert num_ended > 2


def test_large_schemas_take_linear_time() -> None:
    def seconds(num: int) -> float:
        chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)} | {f"d{num}": ONE}
        names = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(num)}
        began = time.process_time()
        made({"properties": names, "$defs": chain, "x" * num: None})
        return time.process_time() - began

    assert seconds(8000) < 60 * (seconds(400) + 0.01)  # 20 times as much; quadratic, 400 times
    nested: Any = {"$ref": "#"}
    for number in range(45):
        nested = {"properties": {f"p{number}": nested}, "title": "#" * 10_000}
    assert made(nested)
    copied: Any = {"enum": list(range(60_000))}
    for number in range(45):
        copied = {"properties": {"a": copied}, "anyOf": [{"$ref": "#" + "/properties/a" * number}]}
    with pytest.raises(ValueError, match="references expand it to more than"):
        made(copied)
