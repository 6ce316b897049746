"""Grammars of tools: functions that are not strict are held to nothing."""

import json

import pytest

pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")

from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.tools.grammar import constraint_of_tools, schemas_of_tools
from nanoserve.serve.http.tools.parsers import FORMATS
from nanoserve.serve.http.tools.tool_choice import Function, ToolUse

BAD = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
GOOD = {"properties": {"a": {"const": 0.10774190202629219}}}


def use(*functions: Function, must_call: bool = False) -> ToolUse:
    return ToolUse(FORMATS["hermes"], list(functions), must_call, False, True)


def test_a_plain_function_beside_a_strict_one_may_have_any_schema() -> None:
    both = Function("good", GOOD, True, 0), Function("bad", BAD, False, 1)
    guide = constraint_of_tools(use(*both), lambda text: None)
    assert guide is not None and guide.grammar is not None and '"not"' not in guide.grammar
    guide.check(StructuredOutputsConfig(), object())
    assert [field for field, _ in schemas_of_tools(use(*both))] == ["tools[0].function.parameters"]
    with pytest.raises(ApiError, match=r"^tools\[1\].function.parameters: not") as caught:
        constraint_of_tools(use(*both, must_call=True), lambda text: None)
    assert caught.value.param == "tools[1].function.parameters"
    constraint_of_tools(
        use(*both, must_call=True), lambda text: None, StructuredOutputsConfig(lenient=True)
    )


def test_arguments_are_a_closed_object_unless_the_engine_says_otherwise() -> None:
    for closes in (True, False):
        config = StructuredOutputsConfig(disable_additional_properties=closes)
        guide = constraint_of_tools(use(Function("f", GOOD, True)), lambda text: None, config)
        assert guide is not None and guide.grammar is not None
        line = next(line for line in guide.grammar.split("\n") if line.startswith("args_0"))
        schema = json.loads(line.partition("%json ")[2])
        assert schema["type"] == "object"
        assert schema.get("additionalProperties", True) is not closes
        guide.check(config, object())
