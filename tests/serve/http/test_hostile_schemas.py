"""Grammars of clients that would end the server, or keep others waiting: each gets a 400."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served, served

pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

from nanoserve.serve.async_llm import AsyncLLM

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = AsyncLLM("tiny-qwen3", max_model_len=1024, num_kv_blocks=100)
    with served(llm) as one:
        yield one
    llm.shutdown()


def post(server: Served, **fields: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(CHAT | fields).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)
    }
    return {"$defs": definitions | {f"a{length}": {"type": "string"}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize("length", [1100, 10_000])
@pytest.mark.parametrize(
    "ask",
    [
        lambda s: {"response_format": {"type": "json_schema", "json_schema": {"schema": s}}},
        lambda s: {"guided_json": s},
        lambda s: {"guided_json": json.dumps(s)},
        lambda s: {"structured_outputs": {"json": s}},
        lambda s: {
            "structured_outputs": {
                "structural_tag": {
                    "structures": [{"begin": "<a>", "schema": s, "end": "</a>"}],
                    "triggers": ["<a"],
                }
            }
        },
    ],
)
def test_chains_of_references_are_refused(server: Served, ask: Any, length: int) -> None:
    status, error = post(server, **ask(chain(length)))
    assert status == 400, error
    assert "levels deep" in error["message"] and error["type"] == "invalid_request_error"
    assert post(server)[0] == 200


@pytest.mark.parametrize("is_strict", [True, False])
def test_chains_in_tools_are_refused(server: Served, is_strict: bool) -> None:
    schema = chain(4000)
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}}
    parameters["$defs"] = schema["$defs"]
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    tools = [{"type": "function", "function": function}]
    status, error = post(server, tools=tools, tool_choice="required")
    assert status == 400, error
    assert "levels deep" in error["message"]
    assert post(server)[0] == 200


@pytest.mark.parametrize(
    "grammar",
    ['%llguidance {}\nstart: "a"', '\n%llguidance {"no_forcing": true}\nstart: "a"'],
)
def test_the_librarys_own_options_are_not_for_clients(server: Served, grammar: str) -> None:
    for fields in ({"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
        status, error = post(server, **fields)
        assert status == 400 and "%llguidance" in error["message"]
        assert error["param"] == next(iter(fields))


def test_wide_objects_are_refused(server: Served) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(12_000)}}
    status, error = post(server, guided_json=schema)
    assert status == 400 and "12000 names" in error["message"]
