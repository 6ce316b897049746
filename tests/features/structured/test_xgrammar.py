"""The other backend: what it does not know is refused, and what it knows is obeyed."""

import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import make_qwen3
from tokenizers import Tokenizer as TokenizerBackend

from nanoserve import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("xgrammar", reason="pip install 'nanoserve[xgrammar]'")
pytest.importorskip("jsonschema", reason="pip install jsonschema")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
import jsonschema
from random_grammars import RandomSchema, random_regex

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import count_legal
from nanoserve.features.structured.xgrammar import XGrammar
from nanoserve.text.tokenizer import Tokenizer

VOCAB_SIZE = 2048
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {}, "additionalProperties": {"type": "null"}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"enum": ["a", 1, None, {"b": [2]}]}, "maxItems": 2},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]{2,3}$"},
    {"type": "string", "enum": ["red", 'say "hi"', "\u5757\u8868"]},
    {"type": "integer", "minimum": -3, "maximum": 17},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "number", "minimum": 0.5, "maximum": 1.5},
    {"type": ["boolean", "null"]},
    {"const": {"a": [1, "x"]}},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {
        "type": "object",
        "properties": {"a": {"type": "null"}, 'quo"te': {"type": "integer"}, "c": {"const": 1}},
        "required": ['quo"te'],
        "additionalProperties": False,
    },
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"const": 5}}, "contains"),
    ({"not": {"type": "integer"}}, "not"),
    ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    ({"oneOf": [{"type": "integer"}]}, "oneOf"),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "allOf"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties"),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "additionalProperties": {"type": "null"},
        },
        "additionalProperties",
    ),
    ({"type": "object", "properties": {}, "required": ["z"]}, "z"),
    ({"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5}, "minimum"),
    ({"$ref": "http://example.org/s"}, "example.org"),
    ({"$ref": "#"}, "#"),
    (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "circle",
    ),
    ({"$ref": "#/$defs/none"}, "has no target"),
    ({"type": "string", "pattern": "^[a-c]+$", "maxLength": 3}, "maxLength"),
    ({"type": "string", "pattern": "^a(?=b)"}, r"\(\?"),
    ({"type": "string", "format": "date"}, "format"),
    ({"type": "string", "enum": ["a", 1]}, "1"),
    ({"minimum": 5}, "type=None"),
    ({"type": "strin"}, "strin"),
    ({"type": "integer", "multipleOf": 7}, "multipleOf"),
    ({"type": "integer", "minimum": 2**60}, "2\\^53"),
    ({"type": "number", "minimum": 0.1234567}, "6 decimal places"),
    ({"type": "array", "prefixItems": [{}]}, "prefixItems"),
]


def source(**guide: Any) -> Any:
    return StructuredOutputsParams(**guide).source(StructuredOutputsConfig())


@pytest.fixture(scope="module")
def backend() -> TokenizerBackend:
    return Tokenizer(bundled_checkpoint("tiny-qwen3")).backend


@pytest.fixture(scope="module")
def xgrammar(backend: TokenizerBackend) -> XGrammar:
    return XGrammar(backend, VOCAB_SIZE)


def allowed(grammar: Any) -> list[int]:
    mask = np.empty(VOCAB_SIZE // 32, dtype=np.int32)
    grammar.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(compiled: Any, backend: TokenizerBackend, rng: random.Random) -> str | None:
    """What a model of random logits would say, if it comes to an end."""
    grammar, token_ids = compiled.start(), []
    for _ in range(150):
        choices = allowed(grammar)
        may_end = grammar.may_end
        assert grammar.is_terminated == (may_end and not choices)
        assert choices or may_end, backend.decode(token_ids)
        if may_end and (not choices or rng.random() < 0.3):
            return backend.decode(token_ids, skip_special_tokens=False)
        closing = [i for i in choices if set(backend.id_to_token(i)) & set('"}],')]
        token_ids.append(rng.choice(closing if closing and rng.random() < 0.3 else choices))
        assert token_ids[-1] > 2  # no special token
        grammar.accept(token_ids[-1:])
    return None


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_json_validates(
    number: int, xgrammar: XGrammar, backend: TokenizerBackend, by_size: Callable[..., int]
) -> None:
    rng, compiled = random.Random(number), xgrammar.compile(source(json=SCHEMAS[number]))
    texts = [walk(compiled, backend, rng) for _ in range(by_size(12, 30))]
    for text in filter(None, texts):
        jsonschema.Draft202012Validator(SCHEMAS[number]).validate(json.loads(text))
    assert sum(text is not None for text in texts) > len(texts) / 3


@pytest.mark.parametrize(("schema", "what"), REFUSED)
def test_what_it_would_pass_over_is_refused_by_name(schema: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        XGrammar.check(source(json=schema))


def test_of_random_grammars_it_obeys_those_that_it_takes(
    xgrammar: XGrammar, backend: TokenizerBackend, by_size: Callable[..., int]
) -> None:
    rng, counts = random.Random(1), {"schemas": 0, "regexes": 0}
    for seed in range(by_size(30, 150, 1000)):
        schema, regex = RandomSchema(seed).schema, random_regex(seed)
        for kind, guide in (("schemas", {"json": schema}), ("regexes", {"regex": regex})):
            try:
                compiled = xgrammar.compile(source(**guide))
            except ValueError:
                continue
            for _ in range(3):
                text = walk(compiled, backend, rng)
                if text is None:
                    continue
                counts[kind] += 1
                if kind == "schemas":
                    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                else:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        assert re.fullmatch(regex, text), (regex, text)
    print(counts)
    assert min(counts.values()) > 10, counts


@pytest.mark.parametrize(
    "regex", [r"\bword\b", r"(a)\1", "a(?=b)", "(?i)a", "a^b", r"\p{L}", "a++"]
)
def test_regexes_that_it_reads_in_another_way_are_refused(regex: str) -> None:
    with pytest.raises(ValueError, match=r"supported|means"):
        XGrammar.check(source(regex=regex))


def test_there_and_back_is_as_if_it_had_not_been(xgrammar: XGrammar) -> None:
    for number, schema in enumerate(SCHEMAS):
        rng, shared = random.Random(number), xgrammar.compile(source(json=schema))
        travelled, token_ids = shared.start(), []
        for _ in range(20):
            choices = allowed(travelled) if rng.random() < 0.6 else []
            if choices:
                token_ids.append(rng.choice(choices))
                assert count_legal(travelled, token_ids[-1:]) == 1
                travelled.accept(token_ids[-1:])
            elif token_ids:
                count = rng.randint(1, len(token_ids))
                travelled.rollback(count)
                del token_ids[-count:]
            fresh = shared.start()
            fresh.accept(token_ids)
            assert allowed(fresh) == allowed(travelled)
            assert fresh.may_end == travelled.may_end
            assert fresh.forced(9) == travelled.forced(9)


def test_an_engine_has_it_by_its_name(tmp_path: Path) -> None:
    make_qwen3(tmp_path, vocab_size=VOCAB_SIZE)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=80,
            structured_outputs=StructuredOutputsParams(**guide),
        )
        for guide in ({"json": SCHEMAS[13]}, {"choice": ["yes", "no"]}, {"regex": "[0-9]{3}"})
        for i in range(4)
    ]
    outputs = []
    for jumps in (False, True):
        options: dict[str, Any] = {"tokenizer": "tiny-qwen3", "num_kv_blocks": 200}
        options["structured_outputs_config"] = {"backend": "xgrammar", "jump_forward": jumps}
        with LLM(tmp_path, **options) as llm:
            told = llm.generate([[5]] * len(params), params, use_tqdm=False)
            outputs.append([output.outputs[0].token_ids for output in told])
            jsonschema.validate(json.loads(told[0].outputs[0].text), SCHEMAS[13])
            assert told[4].outputs[0].text in ("yes", "no")
            assert told[8].outputs[0].text.isdigit()
            with pytest.raises(ValueError, match=r"multipleOf.*guidance"):
                bad = StructuredOutputsParams(json={"type": "integer", "multipleOf": 7})
                llm.generate([[5]], SamplingParams(structured_outputs=bad), use_tqdm=False)
    assert outputs[0] == outputs[1]
