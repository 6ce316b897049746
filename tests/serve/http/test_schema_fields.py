"""Schemas of clients over HTTP: refusals name what was sent, and a closed thought stays closed."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from serving import Served, served

pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.text.tokenizer import Tokenizer

QUESTION = {"role": "user", "content": "hi"}
ONE = {"enum": [1, 2]}
# Refused before the library sees it, and by the library.
BAD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
WORSE = {"type": "object", "properties": {"a": {"type": "nothing"}}, "required": ["a"]}
OPEN = {"type": "object", "properties": {"z": ONE}, "required": ["z"]}


def post(server: Served, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [QUESTION], "max_tokens": 60, "temperature": 0} | fields
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters} | fields
    return {"type": "function", "function": function}


def by_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tag(schema: Any) -> dict[str, Any]:
    structure = {"begin": "<a>", "schema": schema, "end": "</a>"}
    return {"structures": [structure], "triggers": ["<a"]}


@pytest.mark.parametrize("schema", [BAD, WORSE])
@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("response_format.json_schema.schema", lambda s: {"response_format": by_format(s)}),
        (
            "response_format.schema",
            lambda s: {"response_format": {"type": "json_object", "schema": s}},
        ),
        (
            "response_format.structures",
            lambda s: {"response_format": {"type": "structural_tag"} | tag(s)},
        ),
        ("structured_outputs.json", lambda s: {"structured_outputs": {"json": s}}),
        (
            "structured_outputs.structural_tag",
            lambda s: {"structured_outputs": {"structural_tag": tag(s)}},
        ),
        ("guided_json", lambda s: {"guided_json": s}),
        ("guided_json", lambda s: {"guided_json": json.dumps(s)}),
        (
            "tools[1].function.parameters",
            lambda s: {"tools": [tool("f", OPEN), tool("g", s)], "tool_choice": "required"},
        ),
        (
            "tools[1].function.parameters",
            lambda s: {
                "tools": [tool("f", OPEN), tool("g", s)],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
        ),
        (
            "tools[0].function.parameters",
            lambda s: {"tools": [tool("f", s, strict=True)], "tool_choice": "required"},
        ),
    ],
)
def test_a_refusal_names_the_field_that_holds_the_schema(
    server: Served, field: str, ask: Any, schema: Any
) -> None:
    status, error = post(server, **ask(schema))
    assert status == 400 and error["param"] == field, error
    assert error["message"].startswith(f"{field}: ")
    assert ("uniqueItems" if schema is BAD else "nothing") in error["message"]
    for inner in ("call_", "args_", "%json", "structured_outputs: "):
        assert inner not in error["message"]


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("guided_regex", {"guided_regex": "(?=a)b"}),
        ("guided_grammar", {"guided_grammar": "start: nowhere"}),
        ("guided_choice", {"guided_choice": []}),
        ("structured_outputs.regex", {"structured_outputs": {"regex": "(?=a)b"}}),
        ("structured_outputs.choice", {"structured_outputs": {"choice": [""]}}),
        ("guided_json", {"guided_json": "no JSON"}),
        ("guided_json", {"guided_json": "{" + '"a":{' * 200 + "}" * 201}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
    ],
)
def test_so_does_one_of_other_formats(server: Served, field: str, ask: dict[str, Any]) -> None:
    status, error = post(server, **ask)
    assert status == 400 and error["param"] == field, error
    assert (
        error["message"].startswith(f"{field}: ") and "json_schema.schema" not in error["message"]
    )


def test_a_schema_beside_json_object_holds_and_objects_are_closed(server: Served) -> None:
    for ask in (
        {"response_format": {"type": "json_object", "schema": OPEN}},
        {"response_format": by_format(OPEN)},
        {"guided_json": OPEN},
        {"structured_outputs": {"json": BAD | OPEN, "lenient": True}},
    ):
        status, message = post(server, **ask)
        assert status == 200 and json.loads(message["content"]).keys() == {"z"}
    named = {"type": "function", "function": {"name": "f"}}
    status, message = post(server, tools=[tool("f", OPEN)], tool_choice=named)
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"z"}


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_thought_that_the_prompt_has_closed_is_not_opened_again(server_llm, name: str) -> None:
    ids = Tokenizer(bundled_checkpoint("tiny-qwen3")).encode("<think>", False)
    biased = {"logit_bias": {str(token_id): 40.0 for token_id in ids}}
    messages = [QUESTION, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]
    ask = {"messages": messages, "continue_final_message": True, **biased}
    with served(server_llm, reasoning_parser=name) as server:
        status, message = post(server, response_format=by_format(OPEN), **ask)
        assert status == 200 and json.loads(message["content"]).keys() == {"z"}, message
        assert not message["reasoning"]
        tools = {"tools": [tool("f", OPEN)], "tool_choice": "required"}
        status, message = post(server, parallel_tool_calls=False, **tools, **ask)
        assert status == 200 and len(message["tool_calls"]) == 1, message
        messages[1]["content"] = "<think>\nWell"  # it is open: its end may come first
        status, message = post(server, response_format=by_format(OPEN), **ask)
        assert status == 200 and message["reasoning"]
        status, error = post(server, guided_grammar='start: "a"', **ask)
        assert (status, error["param"]) == (400, "guided_grammar")
