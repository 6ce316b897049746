"""/v1/responses: items in and out, typed events, and what is stored."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from event_streams import open_stream, streamed
from scripted_model import Script, scripted_llm
from serving import JSON, Served, ask, served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": name, "parameters": CITY} for name in ("weather", "time")]
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"city": "{}"}}}}\n</tool_call>'
TEXTS = {
    "text": "The answer is 42.",
    "thought": "<think>\nHm, what is it?\n</think>\n\nIt is 42.",
    "call": "<think>Ask.</think>I look.\n" + CALL.format("weather", "Paris"),
    "calls": CALL.format("weather", "Paris") + "\n" + CALL.format("time", "Rome"),
    "around": "Before.\n" + CALL.format("weather", "Paris") + "\nAfter.",
    "long": "la " * 200,
    "ok": "That is fine, of course.",
}
KINDS = {
    "text": ["message"],
    "thought": ["reasoning", "message"],
    "call": ["reasoning", "message", "function_call"],
    "calls": ["function_call", "function_call"],
    "around": ["message", "function_call", "message"],
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Served, Script]]:
    with scripted_llm(max_model_len=2048) as (llm, scripts):
        scripts.texts |= TEXTS
        with served(llm, reasoning_parser="qwen3") as server:
            yield server, scripts


@pytest.fixture(scope="module")
def tiny(scripted: tuple[Served, Script]) -> Served:
    return scripted[0]


def body(script: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": f"script: {script}", "tools": TOOLS, **more}


def create(server: Served, script: str, **more: Any) -> dict[str, Any]:
    status, _, answer = ask(server, "/v1/responses", body(script, **more))
    assert status == 200, answer
    return answer


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two of one request."""
    shown = {name: response[name] for name in response if name not in ("id", "created_at")}
    shown.pop("completed_at")
    shown["usage"] = {**shown["usage"], "input_tokens_details": None}
    output = []
    for item in shown["output"]:
        output.append({k: v for k, v in item.items() if k not in ("id", "call_id")})
    return shown | {"output": output}


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of an answer, put together from the events as a client does it."""
    items: list[dict[str, Any]] = []
    open_items: set[int] = set()
    for event in events:
        kind, index = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert index == len(items) and not open_items
            items.append(json.loads(json.dumps(event["item"])))
            open_items.add(index)
        elif kind == "response.content_part.added":
            items[index]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            items[index]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            items[index]["arguments"] += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert items[index]["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "response.function_call_arguments.done":
            assert items[index]["arguments"] == event["arguments"]
        elif kind == "response.output_item.done":
            items[index]["status"] = event["item"]["status"]
            assert items[index] == event["item"]
            open_items.remove(index)
        if "item_id" in event:
            assert event["item_id"] == items[index]["id"]
    assert not open_items
    return items


@pytest.mark.small(script=["call"])
@pytest.mark.parametrize("script", list(KINDS))
def test_a_stream_is_the_response(tiny: Served, script: str, by_size: Any) -> None:
    """At every length at which the output may be cut off, too."""
    whole = create(tiny, script)
    assert [item["type"] for item in whole["output"]] == KINDS[script]
    num_tokens = whole["usage"]["output_tokens"]
    lengths = {num_tokens + 1, *range(1, num_tokens + 1, by_size(num_tokens // 2, 3, 1))}
    for length in lengths:
        answer = create(tiny, script, max_output_tokens=length)
        events = streamed(tiny, "/v1/responses", body(script, max_output_tokens=length))
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        assert [event["type"] for event in events[:2]] == [
            "response.created",
            "response.in_progress",
        ]
        status = "completed" if length > num_tokens else "incomplete"
        last = events[-1]
        assert last["type"] == f"response.{status}" and last["response"]["status"] == status
        assert rebuilt(events) == last["response"]["output"]
        assert without_ids(last["response"]) == without_ids(answer)
        usage = last["response"]["usage"]
        assert usage["output_tokens"] == min(length, num_tokens)
        details = usage["output_tokens_details"]
        items = last["response"]["output"]
        thoughts = [item["content"] for item in items if item["type"] == "reasoning"]
        has_thought = any(part["text"] for parts in thoughts for part in parts)
        assert (details["reasoning_tokens"] > 0) == has_thought


def test_a_conversation_goes_on_by_its_id(scripted: tuple[Served, Script]) -> None:
    """Instructions are those of each request; the calls and the reasoning are kept."""
    server, scripts = scripted
    first = create(server, "call", instructions="Be brief.")
    call = first["output"][-1]
    assert json.loads(call["arguments"]) == {"city": "Paris"} and call["name"] == "weather"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    more = {"previous_response_id": first["id"], "input": [output, {"role": "user", "content": (
        "script: text")}]}  # fmt: skip
    second = create(server, "", **more)
    prompt = scripts.prompts[-1]
    assert "Be brief." not in prompt and prompt.count("script: call") == 1
    assert "<think>\nAsk.\n</think>\n\nI look.\n<tool_call>" in prompt
    assert '"city": "Paris"' in prompt and "tool\nsunny<|im_end|>" in prompt
    assert second["output"][-1]["content"][0]["text"] == TEXTS["text"]
    assert second["previous_response_id"] == first["id"]
    # The same without the store: all items sent again.
    items = [{"role": "user", "content": "script: call"}, *first["output"], *more["input"]]
    third = create(server, "", input=items, store=False)
    assert scripts.prompts[-1] == prompt
    assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert ask(server, f"/v1/responses/{third['id']}", b"", method="GET")[0] == 404
    # As references, as the AI SDK sends them.
    named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    create(server, "", input=[items[0], *named, *more["input"]])
    assert scripts.prompts[-1] == prompt
    count = {"model": "tiny", "tools": TOOLS, "input": items}
    status, _, counted = ask(server, "/v1/responses/input_tokens", count)
    assert status == 200 and counted["input_tokens"] == second["usage"]["input_tokens"]


def test_arguments_that_are_no_object_become_one(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    scripts.texts["odd"] = '<tool_call>\n{"name": "weather", "arguments": ["Paris"]}\n</tool_call>'
    first = create(server, "odd")
    (call,) = first["output"]
    assert json.loads(call["arguments"]) == ["Paris"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "?"}
    said = {"role": "user", "content": "script: text"}
    create(server, "", previous_response_id=first["id"], input=[output, said])
    assert '{"arguments": ["Paris"]}' in scripts.prompts[-1]


def test_adjacent_messages_of_one_role_are_one(scripted: tuple[Served, Script]) -> None:
    server, scripts = scripted
    items = [{"role": role, "content": text} for role, text in (
        ("developer", "Rules."), ("user", "One."), ("user", "script: text"))]  # fmt: skip
    create(server, "", input=items, instructions="Be brief.", tools=[])
    expected = (
        "<|im_start|>system\nBe brief.\nRules.<|im_end|>\n<|im_start|>user\nOne.\nscript: text"
    )
    assert scripts.prompts[-1].startswith(expected)


def test_fifty_turns_take_more_and_more_from_the_prefix_cache(tiny: Served, by_size: Any) -> None:
    previous, cached = None, [-1]
    for turn in range(by_size(6, 50, 50)):
        text = f"script: ok; {turn}, and you?"
        more = {"tools": [], "input": text, "previous_response_id": previous}
        response = create(tiny, "ok", **more)
        previous = response["id"]
        cached.append(response["usage"]["input_tokens_details"]["cached_tokens"])
        assert cached[-1] > cached[-2], turn


def test_reasoning_goes_round_without_the_store(scripted: tuple[Served, Script]) -> None:
    """Also for a client that keeps nothing of it but what is called encrypted."""
    server, scripts = scripted
    answer = create(server, "call", include=["reasoning.encrypted_content"], store=False)
    kept = {"type": "reasoning", "summary": [], "id": answer["output"][0]["id"]}
    sealed = kept | {"encrypted_content": answer["output"][0]["encrypted_content"]}
    start = {"role": "user", "content": "script: text"}
    for reasoning, shown in (
        (answer["output"][0], True),
        (sealed, True),
        (kept | {"encrypted_content": "gAAAAAB"}, False),
    ):
        create(server, "", input=[start, reasoning, answer["output"][1], start])
        assert ("<think>\nAsk.\n</think>" in scripts.prompts[-1]) == shown
    plain = create(server, "call")
    assert plain["output"][0]["encrypted_content"] is None


def test_what_is_stored_can_be_read_and_forgotten(tiny: Served) -> None:
    def get(path: str, method: str = "GET") -> tuple[int, Any]:
        status, _, answer = ask(tiny, f"/v1/responses/{path}", b"", method=method)
        return status, answer

    first = create(tiny, "thought", metadata={"a": "b"}, user="me")
    second = create(tiny, "text", previous_response_id=first["id"])
    assert get(first["id"]) == (200, first) and first["metadata"] == {"a": "b"}
    status, listed = get(f"{second['id']}/input_items?order=asc")
    assert status == 200 and listed["object"] == "list" and not listed["has_more"]
    assert [item["type"] for item in listed["data"]] == ["message", "reasoning"] + ["message"] * 2
    status, page = get(f"{second['id']}/input_items?limit=2")
    assert page["data"] == listed["data"][:1:-1] and page["has_more"]
    status, rest = get(f"{second['id']}/input_items?limit=2&after={page['last_id']}")
    assert rest["data"] == listed["data"][1::-1] and not rest["has_more"]
    for query in ("order=up", "limit=0", "limit=101", "limit=x", "after=nothing"):
        assert get(f"{second['id']}/input_items?{query}")[0] == 400
    assert get(f"{second['id']}?stream=true")[0] == 400
    assert get(f"{first['id']}/cancel", "POST")[0] == 400  # it has ended
    deleted = {"id": first["id"], "object": "response", "deleted": True}
    assert get(first["id"], "DELETE") == (200, deleted)
    for path, method in (
        (first["id"], "GET"),
        (first["id"], "DELETE"),
        (f"{first['id']}/cancel", "POST"),
        (f"{first['id']}/input_items", "GET"),
    ):
        status, answer = get(path, method)
        assert status == 404 and answer["error"]["code"] == "response_not_found"
    status, _, answer = ask(tiny, "/v1/responses", body("text", previous_response_id=first["id"]))
    assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
    assert answer["error"]["param"] == "previous_response_id"
    # What continues it has its items.
    third = create(tiny, "text", previous_response_id=second["id"])
    assert len(get(f"{third['id']}/input_items")[1]["data"]) == 6


def test_the_store_is_bounded(scripted: tuple[Served, Script]) -> None:
    llm = scripted[0].api.llm
    with served(llm, max_stored_responses=2) as server:
        ids = [create(server, "text")["id"] for _ in range(3)]
        got = [ask(server, f"/v1/responses/{one}", b"", method="GET")[0] for one in ids]
        assert got == [404, 200, 200]
    with served(llm, max_stored_responses=0) as server:
        answer = create(server, "text")
        assert not answer["store"]
        assert ask(server, f"/v1/responses/{answer['id']}", b"", method="GET")[0] == 404


def test_a_running_response_can_be_cancelled(tiny: Served) -> None:
    with open_stream(tiny, "/v1/responses", body("long")) as events:
        response_id = next(events)["response"]["id"]
        while next(events)["type"] != "response.output_text.delta":
            pass
        path = f"/v1/responses/{response_id}"
        status, _, running = ask(tiny, path, b"", method="GET")
        assert status == 200 and running["status"] == "in_progress"
        early = body("text", previous_response_id=response_id)
        assert ask(tiny, "/v1/responses", early)[0] == 400
        status, _, cancelled = ask(tiny, f"{path}/cancel", b"")
        assert status == 200 and cancelled["status"] == "cancelled"
        rest = list(events)
        assert rest[-1]["type"] == "response.incomplete"
        last = rest[-1]["response"]
        assert last["status"] == "cancelled" and 0 < last["usage"]["output_tokens"] < 200
        assert last["output"][0]["status"] == "incomplete"
    assert ask(tiny, path, b"", method="GET")[2] == last
    tiny.wait_until_idle()


def test_json_by_a_schema(tiny: Served) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    schema = {
        "type": "object",
        "properties": {"level": {"enum": ["easy", "hard"]}},
        "required": ["level"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    asked = {"model": "tiny", "input": "How hard is it?", "text": {"format": form}}
    status, _, answer = ask(tiny, "/v1/responses", asked | {"reasoning": {"effort": "none"}})
    assert status == 200 and answer["text"]["format"] == form
    assert json.loads(answer["output"][0]["content"][0]["text"])["level"] in ("easy", "hard")
    called = body("", tools=TOOLS, tool_choice={"type": "function", "name": "time"})
    events = streamed(
        tiny, "/v1/responses", called | {"input": "x", "reasoning": {"effort": "none"}}
    )
    items = rebuilt(events)
    assert items[-1]["type"] == "function_call" and items[-1]["name"] == "time"


def test_log_probabilities_of_a_plain_answer(server: Served) -> None:
    """Of the text, in all events; with reasoning or tools they are refused."""
    asked = {"input": "What is a KV cache?", "max_output_tokens": 6, "top_logprobs": 2}
    asked |= {"include": ["message.output_text.logprobs"]}
    status, _, answer = ask(server, "/v1/responses", asked)
    (part,) = answer["output"][0]["content"]
    assert status == 200 and len(part["logprobs"]) == 6
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    events = streamed(server, "/v1/responses", asked)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    tokens = [entry["token"] for event in deltas for entry in event["logprobs"]]
    assert tokens == [entry["token"] for entry in part["logprobs"]]
    assert ask(server, "/v1/responses", asked | {"include": []})[0] == 400


def test_the_events_are_those_of_the_sdk(tiny: Served) -> None:
    types = pytest.importorskip("openai.types.responses", reason="pip install openai")
    from pydantic import TypeAdapter

    event_type = TypeAdapter(types.ResponseStreamEvent)
    for script in ("thought", "calls"):
        for event in streamed(tiny, "/v1/responses", body(script)):
            event_type.validate_python(event)
        types.Response.model_validate(create(tiny, script))


def test_requests_as_codex_sends_them(scripted: tuple[Served, Script]) -> None:
    """Stateless: each request has all items, and only the sealed reasoning."""
    server, scripts = scripted
    shell = {"type": "function", "name": "weather", "description": "x", "strict": False}
    asked = {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "tools": [shell | {"parameters": CITY}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a-b-c",
        "text": {"verbosity": "medium"},
    }
    part = {"type": "input_text", "text": "script: call"}
    items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": [part]}]
    events = streamed(server, "/v1/responses", asked | {"input": items})
    for item in events[-1]["response"]["output"]:
        kept = {name: item[name] for name in item if name not in ("id", "status")}
        if item["type"] == "reasoning":
            del kept["content"]
        items.append(kept)
    call_id = items[-1]["call_id"]
    told = {"type": "function_call_output", "call_id": call_id, "output": "script: text"}
    events = streamed(server, "/v1/responses", asked | {"input": [*items, told]})
    assert events[-1]["response"]["output"][-1]["content"][0]["text"] == TEXTS["text"]
    assert "<think>\nAsk.\n</think>" in scripts.prompts[-1]
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0


# A change of a request, a part of the message and the field that the error names.
REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"input": None}, "input is empty", "input"),
    ({"input": 5}, "input: ", "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]: type='web_sea", "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0]: role='tool'", "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image", "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "'c'", "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "x"}]},
     "input: the arguments of 'f'", "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]: type='web_search'", "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "one string", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]", "tools[0].function"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "schema",
     "tools[0].parameters"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice='any'", "tool_choice"),
    ({"background": True}, "background", "background"),
    ({"conversation": "conv_1"}, "previous_response_id", "conversation"),
    ({"prompt": {"id": "p"}}, "instructions", "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "shorten", "context_management"),
    ({"truncation": "middle"}, "truncation", "truncation"),
    ({"include": ["everything"]}, "include", "include"),
    ({"include": ["message.output_text.logprobs"]}, "without tools", "include"),
    ({"max_tokens": 5}, "max_output_tokens", "max_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens=0", "max_output_tokens"),
    ({"max_output_tokens": 9999}, "maximum context length", "max_output_tokens"),
    ({"messages": []}, "use input", "messages"),
    ({"n": 2}, "several requests", "n"),
    ({"temperature": -1}, "temperature", "temperature"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort='huge'", "reasoning.effort"),
    ({"reasoning": {"mode": "pro"}}, "one mode", "reasoning.mode"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format",
     "text.format.schema"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity='loud'", "text.verbosity"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "metadata"),
    ({"top_k": "x"}, "top_k", "top_k"),
    ({"model": "gpt-5"}, "gpt-5", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words", "param"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_is_not_supported_is_refused_by_name(
    tiny: Served, change: dict[str, Any], words: str, param: str | None
) -> None:
    status, _, answer = ask(tiny, "/v1/responses", body("text") | change)
    assert status == (404 if param == "model" else 400), answer
    assert words in answer["error"]["message"] and answer["error"]["param"] == param


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
def test_numbers_that_json_cannot_have_are_refused(tiny: Served, number: str) -> None:
    for field in (f'"text": {{"x": {number}}}', f'"reasoning": {{"x": {number}}}'):
        content = f'{{"model": "tiny", "input": "script: text", {field}}}'.encode()
        status, _, answer = ask(tiny, "/v1/responses", content, JSON)
        assert status == 400 and answer["error"]["param"] in ("text", "reasoning")


def test_neutral_and_harmless_fields(tiny: Served) -> None:
    answer = create(
        tiny,
        "text",
        background=False,
        truncation="auto",
        parallel_tool_calls=True,
        tool_choice="auto",
        text={"format": {"type": "text"}, "verbosity": "low"},
        reasoning={"effort": "medium", "summary": "auto"},
        include=["file_search_call.results"],
        stream_options={"include_obfuscation": False},
        service_tier="auto",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        safety_identifier="s",
        max_tool_calls=3,
        top_logprobs=0,
        top_k=5,
        seed=1,
        n=1,
        cache_salt="a",
        priority=0,
    )
    assert answer["prompt_cache_key"] == "k" and answer["max_tool_calls"] == 3


def test_a_key_and_a_full_queue(scripted: tuple[Served, Script]) -> None:
    with served(scripted[0].api.llm, api_key=["k"]) as server:
        assert ask(server, "/v1/responses", body("text"))[0] == 401
        for key in ({"authorization": "Bearer k"}, {"x-api-key": "k"}):
            assert ask(server, "/v1/responses", body("text", tools=[]), JSON | key)[0] == 200
