"""Tools and a format in one request over HTTP, from a model that tries what a script says."""

import json
from typing import Any

import pytest
from scripted_model import TEMPLATE, Script
from serving import ask, served

pytest.importorskip("openai", reason="pip install openai")
pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
import openai
from pydantic import BaseModel, Field

from nanoserve.serve.async_llm import AsyncLLM


class Weather(BaseModel):
    """How the weather is somewhere."""

    city: str = Field(max_length=20)


class Report(BaseModel):
    text: str = Field(max_length=40)
    level: int = Field(ge=0, le=9)


def call(city: str, name: str = "Weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


REPORT = '{"text": "It is <tool_call> sunny", "level": 3}'
PARIS = ("Weather", '{"city": "Paris"}')
SCRIPT = Script(
    {
        "Ask for it.": call("Paris"),
        "Twice.": f"{call('Paris')}\n{call('Rome', 'Other')}",
        "Say it.": REPORT,
        "Chat.": "Well, it is <tool_call> sunny.",
        "sunny in Paris": REPORT,
        "Think.": f"<think>\nI could <tool_call> it.\n</think>\n\n{call('Paris')}",
        "Think and say.": f"<think>\nWell.\n</think>\n\n{REPORT}",
    }
)
WEATHER = openai.pydantic_function_tool(Weather)
OTHER = {
    "type": "function",
    "function": {"name": "Other", "parameters": {"type": "object", "not": {"type": "null"}}},
}
TOOLS: list[Any] = [WEATHER, OTHER]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "report", "schema": Report.model_json_schema()},
}


@pytest.fixture(scope="module")
def llm():
    options = {"num_kv_blocks": 400, "max_model_len": 1024, "max_num_seqs": 8}
    llm = AsyncLLM("tiny-qwen3", chat_template=TEMPLATE, logits_processors=[SCRIPT], **options)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def server(llm):
    with served(llm) as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 120, "temperature": 0} | fields


def told(client: openai.OpenAI, text: str, **fields: Any) -> tuple[Any, ...]:
    """Content, calls, reasoning and the finish reason, put together from a stream."""
    content, thought, reason = "", "", None
    pieces: list[list[str]] = []
    for chunk in client.chat.completions.create(**asked(text, **fields), stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        thought += getattr(delta, "reasoning", None) or ""
        for piece in delta.tool_calls or []:
            if piece.id is not None:
                pieces.append([piece.function.name, ""])
            pieces[piece.index][1] += piece.function.arguments
        reason = chunk.choices[0].finish_reason or reason
    return content, [tuple(one) for one in pieces], thought, reason


def told_whole(client: openai.OpenAI, text: str, **fields: Any) -> tuple[Any, ...]:
    """The same without a stream."""
    (choice,) = client.chat.completions.create(**asked(text, **fields)).choices
    message = choice.message
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or []]
    reasoning = getattr(message, "reasoning", None) or ""
    return message.content or "", calls, reasoning, choice.finish_reason


def test_a_model_calls_or_answers_as_it_likes(client) -> None:
    fields = {"tools": TOOLS, "response_format": FORMAT}
    for tell in (told, told_whole):
        assert tell(client, "Ask for it.", **fields) == ("", [PARIS], "", "tool_calls")
        assert tell(client, "Say it.", **fields) == (REPORT, [], "", "stop")
    two = ("", [PARIS, ("Other", '{"city": "Rome"}')], "", "tool_calls")
    assert told(client, "Twice.", **fields) == two
    assert told(client, "Twice.", **fields, parallel_tool_calls=False)[1] == [PARIS]


@pytest.mark.size("full")
def test_what_is_neither_cannot_be_written(client) -> None:
    fields = {"tools": TOOLS, "response_format": FORMAT}
    content, calls, _, reason = told(client, "Chat.", **fields, max_tokens=60)
    assert bool(content) is not bool(calls) or reason == "length"
    assert not content.startswith("Well")
    assert not told(client, "Ask for it.", **fields, tool_choice="none", max_tokens=30)[1]


@pytest.mark.small(choice=["required"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "Weather"}}]
)
def test_a_forced_call_comes_before_the_format(client, choice: Any) -> None:
    forced = {"tools": [WEATHER], "response_format": FORMAT, "parallel_tool_calls": False}
    asked_for = told(client, "Ask for it.", **forced, tool_choice=choice)
    assert asked_for[:3] == ("", [PARIS], "")
    content, calls, _, _ = told(client, "Say it.", **forced, tool_choice=choice, max_tokens=60)
    assert not content and [name for name, _ in calls] == ["Weather"]
    assert told(client, "Say it.", **forced, tool_choice="none")[:2] == (REPORT, [])


@pytest.mark.small(mode=["auto"], more=[{"response_format": FORMAT}])
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("more", [{}, {"response_format": FORMAT}], ids=["free", "format"])
def test_only_allowed_tools_are_called(client, mode: str, more: Any) -> None:
    def choice(name: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    fields = {"tools": TOOLS, "parallel_tool_calls": False, **more}
    one = told(client, "Ask for it.", **fields, tool_choice=choice("Weather"))
    assert one == ("", [PARIS], "", "tool_calls")
    fields["tools"] = [WEATHER, openai.pydantic_function_tool(Report)]
    only = choice("Report")
    _, calls, _, _ = told(client, "Ask for it.", **fields, tool_choice=only, max_tokens=30)
    assert all(name == "Report" for name, _ in calls)
    if mode == "auto" and not more:
        # Free text in which the tag of a call is followed by anything else is none...
        content = told(client, "Say it.", **fields, tool_choice=only, max_tokens=40)[0]
        assert content.startswith('{"text": "It is') and REPORT not in content
        # ... unless nothing is enforced.
        assert told(client, "Say it.", tools=[OTHER])[0] == REPORT


@pytest.mark.parametrize("streams", [False, True])
def test_the_loop_of_openais_client(client, streams: bool) -> None:
    """Parsed arguments, and then the parsed answer."""
    fields = asked("Ask for it.", tools=[WEATHER], response_format=Report)

    def step() -> Any:
        if not streams:
            return client.chat.completions.parse(**fields).choices[0].message
        with client.chat.completions.stream(**fields) as stream:
            return stream.get_final_completion().choices[0].message

    first = step()
    (one,) = first.tool_calls
    assert one.function.parsed_arguments == Weather(city="Paris") and first.parsed is None
    fields["messages"] += [
        {"role": "assistant", "tool_calls": [one.model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": one.id, "content": "sunny in Paris"},
    ]
    for told_call in fields["messages"][1]["tool_calls"]:
        told_call["function"].pop("parsed_arguments", None)
    second = step()
    assert not second.tool_calls and second.parsed == Report(**json.loads(REPORT))


def test_a_thought_comes_before_both(llm) -> None:
    fields = {"tools": [WEATHER], "response_format": FORMAT}
    with (
        served(llm, reasoning_parser="qwen3") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        thought = "I could <tool_call> it."
        assert told(client, "Think.", **fields) == ("", [PARIS], thought, "tool_calls")
        assert told_whole(client, "Think.", **fields) == ("", [PARIS], thought, "tool_calls")
        assert told(client, "Think and say.", **fields) == (REPORT, [], "Well.", "stop")
        assert told(client, "Ask for it.", **fields) == ("", [PARIS], "", "tool_calls")
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        closed: dict[str, Any] = {"extra_body": kwargs, **fields}
        content, _, reasoning, _ = told(client, "Think.", **closed, max_tokens=30)
        assert not reasoning and not content.startswith("<think>")  # it tries, and may not
        assert told(client, "Say it.", **closed)[0] == REPORT


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "at least one tool"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "allowed_tools"),
        ({"guided_choice": ["a"], "tool_choice": "required"}, "guided_choice", "required tool"),
        ({"guided_grammar": 'start: "a"'}, "guided_grammar", "whole output"),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "no such"}}},
            "response_format.schema",
            "no such",
        ),
        (
            {"response_format": FORMAT, "tools": [OTHER | {"function": OTHER["function"] | {
                "strict": True}}]},
            "tools[0].function.parameters",
            "not",
        ),
        ({"response_format": {"type": "xml"}, "tool_choice": "required"}, "response_format", "xml"),
    ],
    ids=str,
)  # fmt: skip
def test_messages_name_the_field(server, fields: Any, field: str, words: str) -> None:
    body = asked("Ask for it.", **{"tools": [WEATHER], **fields})
    status, _, answer = ask(server, "/v1/chat/completions", body)
    assert status == 400 and answer["error"]["param"] == field, answer
    assert words in answer["error"]["message"]
    for inner in ("call_", "args_", "%json", "answer:", "structured_outputs: "):
        assert inner not in answer["error"]["message"]
