"""Tools and formats, asked for with OpenAI's own client."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest
from serving import served
from tokenizers import Tokenizer as TokenizerBackend

pytest.importorskip("openai", reason="pip install openai")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
pytest.importorskip("jsonschema", reason="pip install jsonschema")
import jsonschema
import openai

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import count_legal
from nanoserve.features.structured.guidance import Guidance
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.serve.http.tools.grammar import behind_reasoning, constraint_of_tools
from nanoserve.serve.http.tools.parsers import FORMATS
from nanoserve.serve.http.tools.reasoning import STARTS, Thought
from nanoserve.serve.http.tools.tool_choice import Function, ToolUse
from nanoserve.text.tokenizer import Tokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "What time it is"}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
QUESTION = [{"role": "user", "content": "How will the weather be?"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 400}
SCHEMA = {
    "type": "object",
    "properties": {
        "term": {"type": "string", "maxLength": 12},
        "level": {"enum": ["easy", "hard"]},
    },
    "required": ["term", "level"],
    "additionalProperties": False,
}


NAMES = [name for name, one in FORMATS.items() if one.name == name]  # others are aliases


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def refused(client, **asked: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED | asked)
    return f"{caught.value.param}: {caught.value.message}"


def streamed(client, **asked: Any) -> tuple[str, list[list[str]], str, str]:
    """Text, calls (name, arguments), reason, reasoning: put together from the pieces."""
    text = reason = reasoning = ""
    calls: list[list[str]] = []
    for chunk in client.chat.completions.create(**ASKED | asked, stream=True):
        (choice,) = chunk.choices
        assert not reason, "something came behind the end"
        text += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.type == "function" and call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or ""
    return text, calls, reason, reasoning


@pytest.mark.small(name=["hermes", "openai", "qwen3_coder", "kimi_k2"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_what_must_be_called_is(server_llm, name: str, choice: Any, by_size: Any) -> None:
    several = 0
    with (
        served(server_llm, tool_call_parser=name) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for seed in range(by_size(2, 4, 8)):
            asked = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "temperature": 2.0}
            answer = client.chat.completions.create(**ASKED | asked)
            (told,) = answer.choices
            if told.finish_reason == "length":
                continue  # this model does not know when to stop calling
            calls = [[c.function.name, c.function.arguments] for c in told.message.tool_calls]
            assert told.finish_reason == ("stop" if choice is NAMED else "tool_calls")
            assert told.message.content is None
            assert len({call.id for call in told.message.tool_calls}) == len(calls) >= 1
            for function, arguments in calls:
                schema = WEATHER if function == "get_weather" else {"maxProperties": 0}
                jsonschema.validate(json.loads(arguments), schema)
            assert choice != NAMED or [function for function, _ in calls] == ["get_weather"]
            assert streamed(client, **asked)[:3] == ("", calls, told.finish_reason)
            alone = client.chat.completions.create(**ASKED | asked, parallel_tool_calls=False)
            assert len(alone.choices[0].message.tool_calls) == 1
            several += len(calls) > 1
    print(several)


@pytest.mark.parametrize("streams", [False, True])
def test_the_loop_of_a_client_goes_round(client, streams: bool) -> None:
    """Ask, be called, tell the result, be answered."""
    messages: list[Any] = list(QUESTION)
    asked = {"tools": TOOLS, "temperature": 1.0, "seed": 1}
    for _ in range(2):
        kept = ASKED | asked | {"messages": messages, "tool_choice": "required"}
        if streams:
            calls: list[Any] = []
            for chunk in client.chat.completions.create(**kept, stream=True):
                for piece in chunk.choices[0].delta.tool_calls or []:
                    if piece.id is not None:
                        calls.append(piece.model_dump(exclude={"index"}, exclude_none=True))
                    else:
                        calls[-1]["function"]["arguments"] += piece.function.arguments
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        else:
            answer = client.chat.completions.create(**kept)
            message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message["tool_calls"]:
            json.loads(call["function"]["arguments"])
            result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
            messages.append(result)
    final = client.chat.completions.create(
        **ASKED | {"messages": messages, "tools": TOOLS, "tool_choice": "none"}
    )
    assert final.choices[0].message.tool_calls is None
    assert final.choices[0].message.content and final.choices[0].finish_reason == "stop"


def test_what_is_no_tool_is_refused_by_name(client) -> None:
    def function(**fields: Any) -> list[Any]:
        return [{"type": "function", "function": fields}]

    # The bundled model's template shows it no tools.
    assert "--tool-call-parser" in refused(client, tools=TOOLS)
    assert "--tool-call-parser" in refused(client, tools=TOOLS, tool_choice="auto")
    required = {"tool_choice": "required"}
    assert "tool_choice: " in refused(client, **required)
    assert "'any'" in refused(client, tools=TOOLS, tool_choice="any")
    other = {"type": "function", "function": {"name": "other"}}
    assert "'other'" in refused(client, tools=TOOLS, tool_choice=other)
    assert "two functions" in refused(client, tools=TOOLS + TOOLS, **required)
    assert "a-z" in refused(client, tools=function(name="with space"), **required)
    assert "schema" in refused(client, tools=function(name="f", parameters=[]), **required)
    assert "tools[0]" in refused(client, tools=[{"type": "web_search"}], **required)
    many = [function(name=f"f{number}")[0] for number in range(513)]
    assert "513" in refused(client, tools=many, **required)
    unknown = function(name="f", parameters={"type": "object", "not": {"type": "null"}})
    assert "not" in refused(client, tools=unknown, **required)
    told = refused(client, tools=TOOLS, extra_body={"guided_choice": ["a"]}, **required)
    assert told.startswith("guided_choice: ")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "no JSON"}}
    messages = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    assert "must be a JSON object" in refused(client, messages=messages)


def test_tools_that_may_not_be_called_are_no_obstacle(client) -> None:
    plain = client.chat.completions.create(**ASKED, temperature=0)
    answer = client.chat.completions.create(**ASKED, temperature=0, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_json_by_a_schema(client) -> None:
    """By each of the names for it."""
    described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    texts = set()
    for asked in (
        {"response_format": described},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
    ):
        answer = client.chat.completions.create(**ASKED | asked, temperature=0)
        assert answer.choices[0].finish_reason == "stop"
        texts.add(answer.choices[0].message.content)
        assert streamed(client, **asked, temperature=0)[0] in texts
    (text,) = texts
    jsonschema.validate(json.loads(text), SCHEMA)
    for asked, pattern in (
        ({"guided_regex": r"\d{3}-\d{2}"}, r"\d{3}-\d{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: /[ab]{1,5}/ "!"'}, "[ab]+!"),
        ({"structured_outputs": {"regex": "[x-z]{4}"}}, "[x-z]{4}"),
    ):
        answer = client.chat.completions.create(**ASKED, extra_body=asked)
        assert re.fullmatch(pattern, answer.choices[0].message.content)
        whole = client.completions.create(model="tiny", prompt="a", extra_body=asked)
        assert re.fullmatch(pattern, whole.choices[0].text)
    answer = client.chat.completions.create(
        **ASKED | {"max_tokens": 60}, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.startswith("{")


def test_formats_that_cannot_be_had_are_refused_before_a_stream_begins(client) -> None:
    for stream in (False, True):
        extra = {"guided_json": {"type": "array", "uniqueItems": True}}
        assert "uniqueItems" in refused(client, extra_body=extra, stream=stream)
        assert "unclosed" in refused(client, extra_body={"guided_regex": "("}, stream=stream)
    for asked, what in (
        ({"guided_regex": "a", "guided_choice": ["a"]}, "pass one"),
        ({"structured_outputs": {"regexp": "a"}}, "regexp"),
        ({"structured_outputs": {}}, "exactly one"),
        ({"guided_choice": []}, "at least one"),
        ({"guided_regex": "a" * 10**5}, "characters"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ):
        assert what in refused(client, extra_body=asked)
    assert "json_schema" in refused(client, response_format={"type": "json_schema"})
    assert "xml" in refused(client, response_format={"type": "xml"})


@pytest.fixture(scope="module")
def backend() -> TokenizerBackend:
    return Tokenizer(bundled_checkpoint("tiny-qwen3")).backend


# Of harmony, whose texts are messages, see test_harmony.py.
@pytest.mark.small(name=["hermes", "llama3_json", "mistral", "pythonic", "glm47", "minimax_m2"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "openai"])
def test_amid_free_text_strict_functions_are_called_by_their_schemas(
    name: str, backend: TokenizerBackend, by_size: Any
) -> None:
    """tool_choice="auto": a text, in which what begins as a call goes on as one."""
    functions = [Function("get_weather", WEATHER, True), Function("now", {"type": "object"}, False)]
    rng = random.Random(name)
    form = FORMATS[name].for_functions({one.name: one.parameters for one in functions})
    guide = constraint_of_tools(ToolUse(form, functions, False, False, True), lambda text: None)
    compiled = Guidance(backend, 2048).compile(guide.source(StructuredOutputsConfig()))
    num_calls = 0
    for _ in range(by_size(10, 25)):
        grammar, token_ids = compiled.start(), []
        texts = ["Well. ", "Let me see", "\n"] if form.trigger else []
        for text in [
            *rng.sample(texts, min(1, len(texts))),
            form.trigger or (form.before or form.begin)[0],
        ]:
            more = backend.encode(text).ids
            assert count_legal(grammar, more) == len(more), text
            grammar.accept(more)
            token_ids += more
        assert not grammar.may_end
        for _ in range(200):
            if grammar.may_end or grammar.is_terminated:
                break
            mask = np.empty(64, dtype=np.int32)
            grammar.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            token_ids.append(int(rng.choice(np.flatnonzero(bits))))
            grammar.accept(token_ids[-1:])
        if grammar.may_end:
            _, calls = form.parse(backend.decode(token_ids), True)
            for call in calls:
                num_calls += 1
                assert call.is_complete and call.name in ("get_weather", "now")
                if call.name == "get_weather":
                    jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert num_calls >= by_size(2, 4)
    free = compiled.start()
    words = backend.encode("Just a text, in which nothing is called.").ids
    assert count_legal(free, words) == len(words)
    free.accept(words)
    assert free.may_end
    lax = [Function("now", {"type": "object"}, False)]
    assert constraint_of_tools(ToolUse(form, lax, False, False, True), lambda text: None) is None


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_what_is_thought_before_is_free_and_split_off(server_llm, name: str) -> None:
    described = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    with (
        served(server_llm, reasoning_parser=name) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        plain = client.chat.completions.create(**ASKED, temperature=0)
        if name == "qwen3":  # it may think, and this model does not
            assert plain.choices[0].message.content and plain.choices[0].message.reasoning is None
        else:  # it is thinking from its first word on, and this one never stops
            assert plain.choices[0].message.reasoning and not plain.choices[0].message.content
        # What closes the thought, if the model does not think of it.
        closing = {"logit_bias": {} if name == "qwen3" else bias_to("</think>")}
        asked = {"response_format": described, "temperature": 0, **closing}
        answer = client.chat.completions.create(**ASKED | asked)
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        text, _, reason, reasoning = streamed(client, **asked)
        assert (text, reason) == (choice.message.content or "", choice.finish_reason)
        assert reasoning == (choice.message.reasoning or "")


def bias_to(text: str) -> dict[str, float]:
    """For the tokens of a text that this tokenizer cuts into pieces."""
    encoded = Tokenizer(bundled_checkpoint("tiny-qwen3")).encode(text, False)
    return {str(token_id): 20.0 for token_id in encoded}


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("guide", "right", "wrong"),
    [
        ({"json": SCHEMA}, '{"term": "a", "level": "easy"}', '{"term": 1'),
        ({"regex": r"a/\d+"}, "a/12", "a12"),
        ({"choice": ["yes", "no"]}, "no", "maybe"),
    ],
)
def test_behind_a_thought_the_format_holds(
    name: str, guide: dict[str, Any], right: str, wrong: str, backend: TokenizerBackend
) -> None:
    params = StructuredOutputsParams(**guide)
    assert behind_reasoning(params, Thought.CLOSED, lambda text: None) is params
    whole = behind_reasoning(params, STARTS[name], lambda text: None)
    compiled = Guidance(backend, 2048).compile(whole.source(StructuredOutputsConfig()))
    thoughts = ["<think>Is it { or yes?\n</think>\n\n", "Well. </think>"]
    thoughts = thoughts if name == "deepseek_r1" else [thoughts[0], ""]
    for thought in thoughts:
        for text, is_right in ((right, True), (wrong, False)):
            grammar, token_ids = compiled.start(), backend.encode(thought + text).ids
            assert (count_legal(grammar, token_ids) == len(token_ids)) is is_right, thought + text
            if is_right:
                grammar.accept(token_ids)
                assert grammar.may_end
    if name == "qwen3":
        text = backend.encode("Just text, without a thought").ids
        assert count_legal(compiled.start(), text) < len(text)
