"""Clients that nobody here wrote, with the two newer APIs: SDKs, and an agent's framework."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from scripted_model import Script, scripted_llm
from serving import Served, served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

pytestmark = pytest.mark.size("full")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXTS = {
    "text": "It is sunny in Paris.",
    "thought": "<think>\nHm.\n</think>\n\nIt is 42.",
    "call": f"<think>Ask.</think>I look.\n{CALL}",
    "json": '{"level": "easy"}',
}
TOLD = "sunny, script: text"  # what the tool answers; the model then says so


class Level(BaseModel):
    level: Literal["easy", "hard"]


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Served, Script]]:
    with scripted_llm(max_model_len=2048) as (llm, scripts):
        scripts.texts |= TEXTS
        with served(llm, reasoning_parser="qwen3", api_key=["key"]) as server:
            yield server, scripts


@pytest.fixture
def openai_client(scripted: tuple[Served, Script]) -> Iterator[Any]:
    openai = pytest.importorskip("openai", reason="pip install openai")
    url = f"{scripted[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="key", max_retries=0) as client:
        yield client


@pytest.fixture
def anthropic_client(scripted: tuple[Served, Script]) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    url = scripted[0].url
    with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as client:
        yield client


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}


def test_openai_responses(openai_client: Any) -> None:
    create = openai_client.responses.create
    answer = create(model="tiny", input="script: thought", tools=[FUNCTION])
    assert answer.output_text == "It is 42."
    assert answer.output[0].content[0].text == "Hm."
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    called = create(model="tiny", input="script: call", tools=[FUNCTION])
    call = called.output[-1]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": TOLD}
    for more in (
        {"input": [output], "previous_response_id": called.id},
        {"input": [{"role": "user", "content": "x"}, *called.output, output], "store": False},
    ):
        answer = create(model="tiny", tools=[FUNCTION], **more)
        assert answer.output_text == TEXTS["text"]
    assert openai_client.responses.retrieve(called.id).output[-1].name == "weather"
    items = list(openai_client.responses.input_items.list(called.id))
    assert items[0].content[0].text == "script: call"
    counted = openai_client.responses.input_tokens.count(model="tiny", input="script: call")
    assert counted.input_tokens > 0
    openai_client.responses.delete(called.id)


def test_openai_streams(openai_client: Any) -> None:
    for script, kinds in (("thought", ["reasoning", "message"]), ("call", [])):
        asked = {"model": "tiny", "input": f"script: {script}", "tools": [FUNCTION]}
        with openai_client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == final.output_text
        assert not kinds or [item.type for item in final.output] == kinds
        for event in events:
            assert type(event).__name__ != "BaseModel", event  # a type that the SDK has
    assert final.output[-1].type == "function_call"


def test_openai_parses_what_it_asked_for(openai_client: Any) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    asked = {"model": "tiny", "input": "script: json", "text_format": Level}
    answer = openai_client.responses.parse(**asked)
    assert answer.output_parsed == Level(level="easy")
    with openai_client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == Level(level="easy")


def test_openai_errors(openai_client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        openai_client.responses.create(model="tiny", input="x", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type" and "web_search" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve("resp_1")
    wrong = openai_client.with_options(api_key="other")
    with pytest.raises(openai.AuthenticationError):
        wrong.responses.create(model="tiny", input="x")


def test_an_agent_with_a_tool_and_one_with_an_output_type(
    scripted: tuple[Served, Script],
) -> None:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    import openai

    agents.set_tracing_disabled(True)
    asked_for: list[str] = []

    @agents.function_tool(strict_mode=False)
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        asked_for.append(city)
        return TOLD

    async def run() -> None:
        url = f"{scripted[0].url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            model = agents.OpenAIResponsesModel(model="tiny", openai_client=client)
            agent = agents.Agent(name="a", instructions="Be brief.", tools=[weather], model=model)
            result = await agents.Runner.run(agent, "script: call")
            assert result.final_output == TEXTS["text"] and asked_for == ["Paris"]
            streamed = agents.Runner.run_streamed(agent, "script: call")
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == TEXTS["text"] and asked_for == ["Paris"] * 2
            history = [*result.to_input_list(), {"role": "user", "content": "script: text"}]
            again = await agents.Runner.run(agent, history)
            assert again.final_output == TEXTS["text"]
            by_id = await agents.Runner.run(
                agent, "script: text", previous_response_id=result.last_response_id
            )
            assert by_id.final_output == TEXTS["text"]
            pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
            typed = agents.Agent(name="b", output_type=Level, model=model)
            result = await agents.Runner.run(typed, "script: json")
            assert result.final_output == Level(level="easy")

    asyncio.run(run())


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


TOOL = {"name": "weather", "input_schema": WEATHER}


def test_anthropic_messages(anthropic_client: Any) -> None:
    asked = {"model": "tiny", "max_tokens": 200, "tools": [TOOL]}
    answer = anthropic_client.messages.create(messages=said("script: thought"), **asked)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer._request_id
    with anthropic_client.messages.stream(messages=said("script: call"), **asked) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == "I look." and message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": TOLD}
    messages = [
        *said("script: call"),
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = anthropic_client.messages.create(messages=messages, **asked)
    assert answer.content[0].text == TEXTS["text"]
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=messages, tools=[TOOL])
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_anthropic_runs_tools_and_parses(anthropic_client: Any) -> None:
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tell the weather of a city.

        Args:
            city: its name
        """
        return f"{city}: {TOLD}"

    for stream in (False, True):
        runner = anthropic_client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=200,
            tools=[weather],
            messages=said("script: call"),
            stream=stream,
        )
        last = runner.until_done()
        assert last.content[-1].text == TEXTS["text"]
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    asked = {"model": "tiny", "max_tokens": 99, "messages": said("script: json")}
    answer = anthropic_client.messages.parse(output_format=Level, **asked)
    assert answer.parsed_output == Level(level="easy")


def test_anthropic_errors(anthropic_client: Any) -> None:
    import anthropic

    asked = {"model": "tiny", "max_tokens": 9, "messages": said("script: text")}
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(**asked | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError) as caught:
        anthropic_client.messages.create(**asked, tools=[{"type": "bash_20250124", "name": "x"}])
    assert "bash_20250124" in str(caught.value)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client.with_options(api_key="other").messages.create(**asked)


def test_a_coding_agent_of_openai(scripted: tuple[Served, Script], openai_client: Any) -> None:
    """As Codex works: stateless, streamed, each request with all items, calls before an answer."""
    scripts = scripted[1]
    items: list[Any] = [{"role": "user", "content": "script: call"}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "instructions": "You are a coding agent.",
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "prompt_cache_key": "session",
    }
    cached, kinds = [], []
    for told in ("script: call", "script: call", TOLD, None):
        with openai_client.responses.stream(input=items, **asked) as stream:
            response = [*stream][-1].response
        cached.append(response.usage.input_tokens_details.cached_tokens)
        kinds.append([item.type for item in response.output])
        items += [item.model_dump(exclude_none=True) for item in response.output]
        if told is not None:
            call_id = response.output[-1].call_id
            items.append({"type": "function_call_output", "call_id": call_id, "output": told})
    assert kinds == [["reasoning", "message", "function_call"]] * 3 + [["message"]]
    assert response.output_text == TEXTS["text"]
    assert cached[1:] == sorted(set(cached[1:])) and cached[1] > 0  # more and more
    assert scripts.prompts[-1].count("<think>\nAsk.\n</think>") == 3


def test_a_coding_agent_of_anthropic(
    scripted: tuple[Served, Script], anthropic_client: Any
) -> None:
    """As Claude Code works: streamed, thinking, marks for the cache, a failed call among others."""
    scripts = scripted[1]
    mark = {"cache_control": {"type": "ephemeral"}}
    asked: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "You are a coding agent.", **mark}],
        "tools": [TOOL | {"description": "Tells the weather."} | mark],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "u"},
        "betas": ["interleaved-thinking-2025-05-14"],
    }
    messages: list[Any] = said("script: call")
    cached, kinds = [], []
    for told in ("script: call", "script: call", TOLD, None):
        with anthropic_client.beta.messages.stream(messages=messages, **asked) as stream:
            answer = stream.get_final_message()
        cached.append(answer.usage.cache_read_input_tokens)
        kinds.append([block.type for block in answer.content])
        messages.append({"role": "assistant", "content": answer.content})
        if told is not None:
            result = {"type": "tool_result", "tool_use_id": answer.content[-1].id}
            result |= {"content": [{"type": "text", "text": told}], "is_error": told == TOLD}
            messages.append({"role": "user", "content": [result | mark]})
    assert kinds == [["thinking", "text", "tool_use"]] * 3 + [["text"]]
    assert answer.stop_reason == "end_turn" and answer.content[0].text == TEXTS["text"]
    assert cached[1:] == sorted(set(cached[1:])) and cached[1] > 0
    assert scripts.prompts[-1].count("<think>\nAsk.\n</think>") == 3
