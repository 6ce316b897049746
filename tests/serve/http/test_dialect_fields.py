"""Every field that the SDKs of the three APIs have is honoured, harmless or refused by name."""

import json
import logging
import random
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from scripted_model import scripted_llm
from serving import Served, ask, served
from type_fuzz import random_value, spoiled

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve.compat import request_names
from nanoserve.serve.http.messages import fields as messages_fields
from nanoserve.serve.http.messages.request import MessagesBody
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.responses import fields as responses_fields
from nanoserve.serve.http.responses.request import ResponsesBody


def known_names(fields: Any, body: Any, place: str) -> set[str]:
    if place:
        known, foreign = fields.PLACES[place]
        return {*known, *foreign}
    own = fields.FOREIGN.keys() | fields.HARMLESS | body.passed_on()
    return {*own, *request_names.HARMLESS, *body.model_fields}


def names_of(kind: Any) -> set[str]:
    return {*get_type_hints(kind, include_extras=True)}


def test_the_fields_of_openai_are_known() -> None:
    responses = pytest.importorskip("openai.types.responses", reason="pip install openai")
    from openai.types.responses import response_create_params, response_input_item_param
    from openai.types.shared_params import Reasoning

    item = response_input_item_param
    for place, kind in {
        "": response_create_params.ResponseCreateParamsBase,
        "text": responses.ResponseTextConfigParam,
        "text.format": responses.ResponseFormatTextJSONSchemaConfigParam,
        "reasoning": Reasoning,
        "tools": responses.FunctionToolParam,
        "stream_options": response_create_params.StreamOptions,
        "prompt_cache_options": getattr(response_create_params, "PromptCacheOptions", dict),
        "input.message": responses.ResponseOutputMessageParam,
        "input.function_call": responses.ResponseFunctionToolCallParam,
        "input.function_call_output": item.FunctionCallOutput,
        "input.reasoning": responses.ResponseReasoningItemParam,
        "input.content": responses.ResponseInputTextParam,
    }.items():
        unknown = names_of(kind) - known_names(responses_fields, ResponsesBody, place)
        assert not unknown, place
    counted = names_of(responses.InputTokenCountParams)
    assert counted - known_names(responses_fields, ResponsesBody, "") <= {"personality"}


@pytest.mark.parametrize(
    ("fields", "body"), [(responses_fields, ResponsesBody), (messages_fields, MessagesBody)]
)
def test_each_field_of_a_chat_is_one_here_or_is_refused(fields: Any, body: Any) -> None:
    known = body.model_fields.keys() | body.passed_on() | fields.HARMLESS | request_names.HARMLESS
    assert ChatBody.model_fields.keys() <= known | fields.FOREIGN.keys()
    for name, one in fields.FOREIGN.items():
        advised = re.findall(r"\buse (\w+)\b(?! of)", one.instead)
        assert not {*advised} & (fields.FOREIGN.keys() - known), name


def test_the_fields_of_anthropic_are_known() -> None:
    types = pytest.importorskip("anthropic.types", reason="pip install anthropic")
    from anthropic.types import beta, message_create_params
    from anthropic.types.beta import message_create_params as beta_params

    for place, kind in (
        ("", beta_params.MessageCreateParamsBase),
        ("tools", beta.BetaToolParam),
        ("thinking", beta.BetaThinkingConfigEnabledParam),
        ("output_config", beta.BetaOutputConfigParam),
        ("messages.content", beta.BetaTextBlockParam),
        ("messages.content", beta.BetaToolUseBlockParam),
        ("messages.content", beta.BetaToolResultBlockParam),
        ("messages.content", beta.BetaThinkingBlockParam),
    ):
        # `betas` is a header.
        unknown = names_of(kind) - known_names(messages_fields, MessagesBody, place)
        assert not unknown - {"betas"}, place
    for place, kind in {
        "": message_create_params.MessageCreateParamsBase,
        "tools": types.ToolParam,
        "tool_choice": types.ToolChoiceToolParam,
        "thinking": types.ThinkingConfigEnabledParam,
        "output_config": types.OutputConfigParam,
        "output_config.format": types.JSONOutputFormatParam,
    }.items():
        unknown = names_of(kind) - known_names(messages_fields, MessagesBody, place)
        assert not unknown, place
    blocks = (types.TextBlockParam, types.ToolUseBlockParam, types.ToolResultBlockParam)
    for kind in (*blocks, types.ThinkingBlockParam, types.RedactedThinkingBlockParam):
        unknown = names_of(kind) - known_names(messages_fields, MessagesBody, "messages.content")
        assert not unknown, kind


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with scripted_llm() as (llm, scripts):
        scripts.texts["text"] = "Yes."
        with served(llm, reasoning_parser="qwen3") as one:
            yield one


def test_an_unknown_field_is_logged_once(server: Served, caplog: Any) -> None:
    message = {"role": "user", "content": "script: text"}
    bodies = {
        "/v1/responses": {"input": [message | {"tempo": 1}], "temperture": 1},
        "/v1/messages": {"messages": [message], "max_tokens": 9, "max_tokns": 1},
    }
    with caplog.at_level(logging.WARNING):
        for path, body in bodies.items():
            for _ in range(2):
                assert ask(server, path, body)[0] == 200
    ignored = [record.message for record in caplog.records if "ignored" in record.message]
    for name, near in (("temperture", "temperature"), ("max_tokns", "max_tokens")):
        (line,) = [line for line in ignored if f"'{name}'" in line]
        assert f"did you mean {near}?" in line
    assert len([line for line in ignored if "'tempo'" in line]) == 1


def kinds() -> dict[str, Any]:
    from anthropic.types import message_create_params
    from openai.types.chat import completion_create_params
    from openai.types.responses import response_create_params

    return {
        "/v1/responses": response_create_params.ResponseCreateParamsNonStreaming,
        "/v1/messages": message_create_params.MessageCreateParamsNonStreaming,
        "/v1/chat/completions": completion_create_params.CompletionCreateParamsNonStreaming,
    }


QUESTION: Any = [{"role": "user", "content": "script: text"}]
SAID: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": {"messages": QUESTION},
    "/v1/chat/completions": {"messages": QUESTION},
}
SMALL: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "tiny", "max_output_tokens": 8},
    "/v1/messages": {"model": "tiny", "max_tokens": 8},
    "/v1/chat/completions": {"model": "tiny", "max_tokens": 8, "n": None},
}


@pytest.mark.parametrize("path", list(SMALL))
@pytest.mark.size("full")
def test_no_body_of_an_sdk_is_too_much(server: Served, path: str, by_size: Any) -> None:
    """Also with something odd in it: an answer, or an error that says what to change."""
    pytest.importorskip("openai", reason="pip install openai")
    pytest.importorskip("anthropic", reason="pip install anthropic")
    rng, statuses = random.Random(path), []
    for _ in range(by_size(50, 600, 6000)):
        body = random_value(rng, kinds()[path])
        if isinstance(body, dict):  # most fields at random are no request
            num_kept = min(len(body), rng.choice((0, 1, 2, 3, len(body))))
            body = {name: body[name] for name in rng.sample(sorted(body), num_kept)}
        if rng.random() < 0.7:
            body = SAID[path] | body | SMALL[path]
        if rng.random() < 0.4:
            body = spoiled(rng, body)
        if isinstance(body, dict):
            body = {**body, "stream": None}
        status, _, answer = ask(server, path, body)
        statuses.append(status)
        assert status in (200, 400, 404), (body, answer)
        if status != 200:
            message = answer["error"]["message"]
            assert message and len(message) < 2000 and "internal" not in message, body
    assert statuses.count(200) > len(statuses) // 50, statuses
    server.wait_until_idle()


# A request of each API with an object of every kind, whose unknown names are logged or refused.
TOOL_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TEXT = [{"type": "text", "text": "script: text"}]
COMPLETE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": TEXT},
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": TEXT},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": TOOL_SCHEMA}}],
        "tool_choice": "auto",
        "stream_options": {"include_usage": True},
        "stream": True,
        "max_tokens": 4,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "script: text"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "script: text"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "annotations": []}],
            },
            {"role": "user", "content": "script: text"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": TOOL_SCHEMA}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 4,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": TEXT},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": "s"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": TEXT}],
            },
        ],
        "system": TEXT,
        "tools": [{"name": "f", "input_schema": TOOL_SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {},
        "max_tokens": 4,
    },
}
FREE = {"parameters", "input_schema", "input"}  # not fields of the API: whatever a client likes


def with_each(value: Any, name: str, path: str = "") -> Iterator[tuple[str, Any]]:
    """The value with one more field, in each object of it in turn."""
    if isinstance(value, dict):
        yield path, value | {name: 1}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        is_free = key in FREE and not (key == "input" and isinstance(inner, list))
        if isinstance(inner, dict | list) and not is_free:
            for place, changed in with_each(inner, name, f"{path}.{key}"):
                if isinstance(value, dict):
                    yield place, value | {key: changed}
                else:
                    yield place, [*value[:key], changed, *value[key + 1 :]]


@pytest.mark.parametrize("path", list(COMPLETE))
def test_no_unknown_field_is_silent(server: Served, path: str, caplog: Any) -> None:
    """In whatever object it is, it is logged or refused."""
    asked, silent = COMPLETE[path], []
    with served(server.api.llm) as fresh:  # one that has logged nothing
        assert ask(fresh, path, asked)[0] == 200
        for number, (place, body) in enumerate(with_each(asked, "zzz")):
            name = f"zzz{number}"  # each is logged once
            body = json.loads(json.dumps(body).replace("zzz", name))
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                status, _, answer = ask(fresh, path, body)
            assert status in (200, 400), (place, answer)
            if status == 200 and f"'{name}'" not in caplog.text:
                silent.append(place)
    assert not silent
