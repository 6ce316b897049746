"""/v1/messages: content blocks in and out, typed events, and errors in that API's format."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from event_streams import parsed, streamed
from scripted_model import Script, scripted_llm
from serving import JSON, Served, ask, served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": name, "input_schema": CITY} for name in ("weather", "time")]
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"city": "{}"}}}}\n</tool_call>'
TEXTS = {
    "text": "The answer is 42.",
    "thought": "<think>\nHm, what is it?\n</think>\n\nIt is 42.",
    "call": "<think>Ask.</think>I look.\n" + CALL.format("weather", "Paris"),
    "calls": CALL.format("weather", "Paris") + "\n" + CALL.format("time", "Rome"),
    "long": "la " * 200,
}
KINDS = {
    "text": ["text"],
    "thought": ["thinking", "text"],
    "call": ["thinking", "text", "tool_use"],
    "calls": ["tool_use", "tool_use"],
}
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", "json"),
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Served, Script]]:
    with scripted_llm() as (llm, scripts):
        scripts.texts |= TEXTS
        with served(llm, reasoning_parser="qwen3") as server:
            yield server, scripts


@pytest.fixture(scope="module")
def tiny(scripted: tuple[Served, Script]) -> Served:
    return scripted[0]


def said(text: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def body(script: str, **more: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "max_tokens": 300, "messages": [said(f"script: {script}")]}
    return asked | {"tools": TOOLS} | more


def create(server: Served, script: str, **more: Any) -> dict[str, Any]:
    status, _, answer = ask(server, "/v1/messages", body(script, **more))
    assert status == 200, answer
    return answer


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, put together from its events as a client does it."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message = events[0]["message"]
    open_block = None
    for event in events[1:]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block = event["content_block"] | {"json": ""}
            message["content"].append(open_block)
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1 and open_block is not None
            source, target = DELTAS[event["delta"]["type"]]
            open_block[target] += event["delta"][source]
        elif kind == "content_block_stop":
            written = open_block.pop("json")
            if open_block["type"] == "tool_use" and written:
                try:
                    open_block["input"] = json.loads(written)
                except ValueError:
                    open_block["input"] = written  # cut off
            open_block = None
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert open_block is None
    return message


@pytest.mark.small(script=["calls"])
@pytest.mark.parametrize("script", list(KINDS))
def test_a_stream_is_the_message(tiny: Served, script: str, by_size: Any) -> None:
    """At every length at which the output may be cut off, too."""
    whole = create(tiny, script)
    assert [block["type"] for block in whole["content"]] == KINDS[script]
    assert whole["stop_reason"] == ("tool_use" if "tool_use" in KINDS[script] else "end_turn")
    num_tokens = whole["usage"]["output_tokens"]
    lengths = {num_tokens + 1, *range(1, num_tokens + 1, by_size(num_tokens // 2, 3, 1))}
    for length in lengths:
        answer = create(tiny, script, max_tokens=length)
        message = rebuilt(streamed(tiny, "/v1/messages", body(script, max_tokens=length)))
        assert (answer["stop_reason"] == "max_tokens") == (length <= num_tokens)
        for one, other in zip(message["content"], answer["content"], strict=True):
            one, other = one | {"id": ""}, other | {"id": ""}
            if isinstance(one.get("input"), str):
                assert isinstance(other.pop("input"), dict) and one.pop("input")
            assert one == other
        for name in ("stop_reason", "stop_sequence", "role", "type", "model"):
            assert message[name] == answer[name]
        usages = message["usage"], answer["usage"]
        assert len({usage["output_tokens"] for usage in usages}) == 1
        assert len({u["input_tokens"] + u["cache_read_input_tokens"] for u in usages}) == 1


def test_tools_go_round(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    answer = create(server, "call", system=[{"type": "text", "text": "Be brief."}])
    call = answer["content"][-1]
    assert call["input"] == {"city": "Paris"} and call["name"] == "weather"
    result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": True}
    result["content"] = [{"type": "text", "text": "no", "cache_control": {"type": "ephemeral"}}]
    messages = [
        said("script: call"),
        said(answer["content"], "assistant"),
        said([result, {"type": "text", "text": "And so?"}]),
        said("script: text"),
    ]
    again = create(server, "", messages=messages, system="Be brief.")
    assert again["content"] == [{"type": "text", "text": TEXTS["text"]}]
    prompt = scripts.prompts[-1]
    assert prompt.count("<|im_start|>system") == 2  # the tools are one
    assert "<think>\nAsk.\n</think>\n\nI look.\n<tool_call>" in prompt
    assert "tool\nno<|im_end|>" in prompt and "user\nAnd so?\nscript: text<|im_end|>" in prompt
    asked = {"model": "tiny", "messages": messages, "system": "Be brief.", "tools": TOOLS}
    status, _, counted = ask(server, "/v1/messages/count_tokens", asked)
    usage = again["usage"]
    num_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert status == 200 and counted == {"input_tokens": num_tokens}


def test_why_an_answer_ends(tiny: Served) -> None:
    stopped = create(tiny, "text", stop_sequences=["zzz", "wer is"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wer is")
    assert stopped["content"] == [{"type": "text", "text": "The ans"}]
    streamed_one = rebuilt(streamed(tiny, "/v1/messages", body("text", stop_sequences=["wer is"])))
    assert streamed_one["stop_sequence"] == "wer is"
    long = "script: long " + "la " * 350
    full = create(tiny, "long", messages=[said(long)], max_tokens=32000)
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert sum(full["usage"].values()) == 1024


def test_thinking_is_switched(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    create(server, "text", thinking={"type": "disabled"})
    assert scripts.prompts[-1].endswith("</think>\n\n")
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}):
        answer = create(server, "thought", thinking=thinking)
        assert not scripts.prompts[-1].endswith("</think>\n\n")
        assert answer["content"][0]["thinking"] == "Hm, what is it?"
        assert answer["content"][0]["signature"]
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = create(server, "thought", **omitted)
    message = rebuilt(streamed(server, "/v1/messages", body("thought", **omitted)))
    assert answer["content"] == message["content"] and not message["content"][0]["thinking"]


def test_the_last_message_is_continued(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    create(server, "", messages=[said("script: text"), said("The", "assistant")])
    assert scripts.prompts[-1].endswith("The")


def test_adjacent_messages_of_one_role_are_one(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    messages = [
        said("Rules.", "system"),
        said([{"type": "text", "text": ""}]),
        said("script: text"),
    ]
    create(server, "", messages=messages, system="Be brief.", tools=[])
    prompt = scripts.prompts[-1]
    assert prompt.startswith("<|im_start|>system\nBe brief.\nRules.<|im_end|>\n<|im_start|>user\ns")


def test_the_fields_of_structured_outputs_hold_here_too(tiny: Served) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    plain = {"tools": [], "thinking": {"type": "disabled"}}
    for field, value in (("guided_choice", ["4"]), ("structured_outputs", {"choice": ["4"]})):
        assert create(tiny, "text", **plain, **{field: value})["content"][0]["text"] == "4"


def test_arguments_that_are_no_object_become_one(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    scripts.texts["odd"] = '<tool_call>\n{"name": "weather", "arguments": ["Paris"]}\n</tool_call>'
    answer = create(server, "odd")
    (block,) = answer["content"]
    assert block["input"] == {"arguments": ["Paris"]} and answer["stop_reason"] == "tool_use"
    message = rebuilt(streamed(server, "/v1/messages", body("odd")))
    assert message["content"][0]["input"] == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "?"}
    messages = [said("x"), said([block], "assistant"), said([result]), said("script: text")]
    create(server, "", messages=messages)


def test_forced_tools_and_formats(tiny: Served) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    off = {"thinking": {"type": "disabled"}, "messages": [said("x")], "max_tokens": 200}
    answer = create(tiny, "", tool_choice={"type": "tool", "name": "time"}, **off)
    assert [block.get("name") for block in answer["content"]] == ["time"]
    single = {"type": "any", "disable_parallel_tool_use": True}
    answer = create(tiny, "", tool_choice=single, **off)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    schema = {"type": "object", "properties": {"level": {"enum": ["easy", "hard"]}},
              "required": ["level"], "additionalProperties": False}  # fmt: skip
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = create(tiny, "", tools=[], output_config=form, **off)
    assert json.loads(answer["content"][0]["text"])["level"] in ("easy", "hard")


def test_the_events_are_those_of_the_sdk(tiny: Served) -> None:
    types = pytest.importorskip("anthropic.types", reason="pip install anthropic")
    from pydantic import TypeAdapter

    event_type = TypeAdapter(types.RawMessageStreamEvent)
    for script in ("thought", "calls"):
        for event in streamed(tiny, "/v1/messages", body(script)):
            event_type.validate_python(event)
        types.Message.model_validate(create(tiny, script))


def test_requests_as_claude_code_sends_them(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    cached = {"cache_control": {"type": "ephemeral"}}
    headers = JSON | {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    system = [{"type": "text", "text": "You are a coding agent."}, {"type": "text", "text": "Now."}]
    asked = {
        "model": "tiny",
        "max_tokens": 32000,
        "system": [system[0], system[1] | cached],
        "tools": [TOOLS[0] | {"description": "x"} | cached],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "metadata": {"user_id": "user_1"},
        "temperature": 1,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    messages = [said([{"type": "text", "text": "script: call"} | cached])]
    path = "/v1/messages?beta=true"
    first = rebuilt(streamed(server, path, asked | {"messages": messages}, headers))
    use = first["content"][-1]
    told = {"type": "tool_result", "tool_use_id": use["id"], "content": "script: text"}
    messages += [said(first["content"], "assistant"), said([told | cached])]
    second = rebuilt(streamed(server, path, asked | {"messages": messages}, headers))
    assert second["content"] == [{"type": "text", "text": TEXTS["text"]}]
    assert second["usage"]["cache_read_input_tokens"] > 0
    assert "You are a coding agent.\nNow." in scripts.prompts[-1]


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    ({"messages": [said("x", "tool")]}, "messages.0: role='tool'"),
    ({"messages": [said([IMAGE])]}, "messages.0.content.0: a block of type 'image'"),
    ({"messages": [said([{"type": "document"}])]}, "text block"),
    ({"messages": [said([RESULT])]}, "no tool_use before it"),
    ({"messages": [said("x"), said([USE], "assistant")]}, "without a tool_result"),
    ({"messages": [said([USE])]}, "'tool_use' is not supported"),
    ({"messages": [said([{"type": "text"}])]}, "text must be a string"),
    ({"messages": [said(5)]}, "messages.0.content"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"system": [IMAGE]}, "system.0"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"name": "f", "parameters": {}}]}, "use input_schema"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "a-z"),
    ({"tool_choice": {"type": "required"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "other"}}, "'other'"),
    ({"tool_choice": {"type": "any"}, "tools": None}, "tool_choice 'any' needs tools"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort='huge'"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}, "tools": None},
     "output_config.format.schema"),
    ({"stop": ["x"]}, "use stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "shorten messages"),
    ({"mcp_servers": [{"url": "x"}]}, "runs no tools"),
    ({"thread": {"type": "create"}}, "thread is not supported: send the whole conversation"),
    ({"compaction": {}}, "compaction is not supported"),
    ({"messages": [said("x", "system") | {"clear_at": "later"}]}, "messages.0.clear_at"),
    ({"container": "c"}, "runs no tools"),
    ({"n": 2}, "several requests"),
    ({"temperature": -1}, "temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_is_not_supported_is_refused_by_name(
    tiny: Served, change: dict[str, Any], words: str
) -> None:
    if "schema" in words:
        pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    status, headers, answer = ask(tiny, "/v1/messages", body("text") | change)
    assert status == 400 and answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]
    assert answer["request_id"] == headers["request-id"] == headers["x-request-id"]


def test_harmless_fields(tiny: Served) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    create(
        tiny,
        "",
        messages=[said([{"type": "text", "text": "script: text", "citations": None, **cached}])],
        tools=[TOOLS[0] | cached | {"type": "custom", "allowed_callers": ["direct"]}],
        system=[{"type": "text", "text": "x", **cached}],
        metadata={"user_id": "u"},
        service_tier="auto",
        inference_geo="us",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        tool_choice={"type": "auto", "disable_parallel_tool_use": False},
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        seed=1,
    )


def test_errors_have_the_names_of_that_api(scripted: tuple[Served, Script]) -> None:
    server, llm = scripted[0], scripted[0].api.llm
    long = {"messages": [said("x y " * 2000)]}
    status, _, answer = ask(server, "/v1/messages", body("") | long)
    assert status == 400 and "prompt is too long" in answer["error"]["message"]
    status, _, answer = ask(server, "/v1/messages/count_tokens", body("") | long)
    assert status == 200 and answer["input_tokens"] > 4000
    status, _, answer = ask(server, "/v1/messages", body("text", model="claude"))
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    status, _, answer = ask(server, "/v1/messages", b"{", JSON)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    status, _, answer = ask(server, "/v1/messages/batches", b"{}", JSON)
    assert status == 400 and "nanoserve batch" in answer["error"]["message"]
    status, _, answer = ask(server, "/v1/messages", b"", JSON, "GET")
    assert status == 405 and answer["type"] == "error"
    with served(llm, api_key=["k"], max_body_bytes=1024, heartbeat_interval=0.01) as locked:
        status, _, answer = ask(locked, "/v1/messages", body("text"))
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        key = JSON | {"x-api-key": "k"}
        status, _, answer = ask(locked, "/v1/messages", body("x" * 2000), key)
        assert (status, answer["error"]["type"]) == (413, "request_too_large")
        small = body("long", tools=[])
        text = ask(locked, "/v1/messages", small | {"stream": True}, key)[2]
        kinds = {event["type"] for event in parsed(text)}
        assert {"ping", "message_start", "message_stop"} <= kinds
        locked.api.drain()
        status, _, answer = ask(locked, "/v1/messages", small, key)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error")
