"""What may be asked for, and what is told when it may not."""

import importlib
import json
import pickle
import sys
from typing import Any

import pytest
from fresh_modules import fresh_modules

from nanoserve import LLM, SamplingParams, StructuredOutputsParams
from nanoserve.config import EngineConfig
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import Source

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "null"}}}
ENGINE = StructuredOutputsConfig()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, r"exactly one.*'regex', 'choice'"),
        ({"json_object": 1}, "json_object=1"),
        ({"regex": ""}, "regex=''"),
        ({"regex": 5}, "regex=5"),
        ({"regex": "a" * 20_000}, "20000 characters; at most 16384"),
        ({"regex": "\ud800"}, "regex is not valid Unicode text"),
        ({"choice": []}, "at least one"),
        ({"choice": "yes"}, "choice='yes'"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"choice": ["a"] * 10_001}, "10001 strings; at most 10000"),
        ({"choice": ["\ud800"]}, "choice is not valid"),
        ({"grammar": "s" * 100_000}, "100000 characters"),
        ({"json": "no JSON"}, "json is not JSON"),
        ({"json": "[1]"}, "must be a JSON object"),
        ({"json": 5}, "json=5"),
        ({"json": {"a": float("nan")}}, "json is not JSON"),
        ({"json": {"a": {1, 2}}}, "json is not JSON"),
        ({"json": {"a": "x" * 2**20}}, "characters"),
        ({"json": '{"a":' * 200 + "1" + "}" * 200}, "200 deep; at most 100"),
        ({"structural_tag": {"structures": []}}, "structural_tag must be"),
        ({"regex": "a", "whitespace_pattern": 5}, "whitespace_pattern=5"),
        ({"regex": "a", "disable_additional_properties": 1}, "disable_additional_properties"),
        ({"regex": "a", "lenient": "yes"}, "lenient='yes'"),
        ({"json": '{"maximum": 1e400}'}, "1e400"),
        ({"json": '{"const": 1e-400}'}, "1e-400"),
    ],
)
def test_what_may_not_be_asked_for(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        StructuredOutputsParams(**given).source(ENGINE)


def test_a_structure_begins_with_a_trigger() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g"]}
    with pytest.raises(ValueError, match="must start with one of its triggers"):
        StructuredOutputsParams(structural_tag=tag).source(ENGINE)
    tag["triggers"] = ["<"]
    assert StructuredOutputsParams(structural_tag=tag).source(ENGINE).kind == "structural_tag"
    assert StructuredOutputsParams(structural_tag=json.dumps(tag)).source(ENGINE).text


def test_dictionaries_are_taken_and_unknown_names_refused() -> None:
    params = SamplingParams(structured_outputs={"regex": "a"})
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    for bad, what in (({"regexp": "a"}, "regexp"), ("a", "'a'"), ({1: 2}, "1")):
        with pytest.raises(ValueError, match=what):
            SamplingParams(structured_outputs=bad)
    assert pickle.loads(pickle.dumps(params)) == params


def test_a_request_has_its_own_copy_which_is_checked_again() -> None:
    guide = StructuredOutputsParams(regex="a")
    params = SamplingParams(structured_outputs=guide)
    guide.regex = "b"
    assert params.structured_outputs.regex == "a"
    params.structured_outputs.regex = None
    with pytest.raises(ValueError, match="exactly one"):
        params.validate()


def test_equal_schemas_are_the_same_source_however_they_are_given() -> None:
    as_text = StructuredOutputsParams(json=json.dumps(SCHEMA)).source(ENGINE)
    assert as_text == StructuredOutputsParams(json=SCHEMA).source(ENGINE)
    assert as_text.whitespace == ""
    assert StructuredOutputsParams(choice=["a", "b"]).source(ENGINE) == Source(
        "choice", '["a", "b"]'
    )


def test_whitespace_is_the_engines_or_the_requests() -> None:
    lax = StructuredOutputsConfig(disable_any_whitespace=False)
    assert StructuredOutputsParams(json=SCHEMA).source(lax).whitespace
    own = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    assert own.source(lax).whitespace == ""
    own = StructuredOutputsParams(json=SCHEMA, whitespace_pattern="[ ]?")
    assert own.source(ENGINE).whitespace == "[ ]?"


def test_objects_are_closed_unless_somebody_says_otherwise() -> None:
    opens = StructuredOutputsConfig(disable_additional_properties=False)
    for config, own, closes in (
        (ENGINE, None, True),
        (ENGINE, False, False),
        (opens, None, False),
        (opens, True, True),
    ):
        params = StructuredOutputsParams(json=SCHEMA, disable_additional_properties=own)
        made = json.loads(params.source(config).text)
        assert made.get("additionalProperties", True) is not closes


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"backend": "outlines"}, "backend='outlines'"),
        ({"backends": "xgrammar"}, "backends"),
        ({"jump_forward": 1}, "jump_forward=1"),
        ("xgrammar", "must be a dictionary"),
    ],
)
def test_options_of_the_engine(options: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        EngineConfig("none", structured_outputs_config=options)
    kept = EngineConfig("none", structured_outputs_config={"jump_forward": False})
    assert kept.structured_outputs_config == StructuredOutputsConfig(jump_forward=False)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.features.structured.config.find_spec", lambda name: None)
    with LLM("tiny-qwen3", num_kv_blocks=8) as llm:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        with pytest.raises(ValueError, match=r"pip install 'nanoserve\[guided\]'"):
            llm.generate("a", params, use_tqdm=False)
        assert llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    config = StructuredOutputsConfig(backend="xgrammar")
    with pytest.raises(ValueError, match="pip install xgrammar"):
        StructuredOutputsParams(regex="a").check(config, object())


def test_an_engine_without_a_grammar_loads_nothing_of_it() -> None:
    with fresh_modules("nanoserve", "llguidance", "xgrammar"):
        anew = importlib.import_module("nanoserve")
        with anew.LLM("tiny-qwen3", num_kv_blocks=8) as llm:
            llm.generate("a", anew.SamplingParams(max_tokens=2), use_tqdm=False)
        loaded = {*sys.modules}
    assert "nanoserve.engine.llm_engine" in loaded  # else it would have been another engine
    guiding = {"llguidance", "xgrammar", "nanoserve.sampling.token_masks"}
    assert not guiding & loaded
    assert not [name for name in loaded if name.startswith("nanoserve.features.structured")]
