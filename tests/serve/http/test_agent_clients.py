"""Agents with tools and a type for their answer: each of these frameworks sends both at once."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, Field
from scripted_model import scripted_llm
from serving import served

pytest.importorskip("openai", reason="pip install openai")
pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

pytestmark = pytest.mark.size("full")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REPORT = '{"text": "It is sunny", "level": 3}'
QUESTION = "How is the weather? script: call"


class Report(BaseModel):
    text: str = Field(max_length=40)
    level: int


EXPECTED = Report(**json.loads(REPORT))
asked: list[str] = []


def weather(city: str) -> str:
    """Tell how the weather is in a city."""
    asked.append(city)
    return f"sunny in {city}, script: report"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Without /v1, as Anthropic's SDK takes it."""
    with scripted_llm(max_model_len=2048) as (llm, script):
        script.texts |= {"call": CALL, "report": REPORT}
        with served(llm) as server:
            yield server.url


def check(answer: Any, expected: Any = EXPECTED) -> None:
    """The tool was called once."""
    assert answer == expected and asked == ["Paris"]
    asked.clear()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_openai_agents(url: str, api: Any, streams: bool) -> None:
    """Its own choice of a class for a model is the one of /v1/responses."""
    agents: Any = pytest.importorskip("agents", reason="pip install openai-agents")
    import openai

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            agents.set_default_openai_client(client, use_for_tracing=False)
            agent = agents.Agent(
                name="reporter",
                model="tiny",
                model_settings=agents.ModelSettings(temperature=0, max_tokens=120),
                tools=[agents.function_tool(weather)],
                output_type=Report,
            )
            if not streams:
                return (await agents.Runner.run(agent, QUESTION)).final_output
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result.final_output

    agents.set_tracing_disabled(True)
    if api != "responses":
        agents.set_default_openai_api(api)
    try:
        check(asyncio.run(run()))
    finally:
        agents.set_default_openai_api("responses")


def langchain_model(url: str, api: str) -> Any:
    common = {"api_key": "x", "model": "tiny", "temperature": 0, "max_tokens": 120}
    if api == "messages":
        module = pytest.importorskip(
            "langchain_anthropic", reason="pip install langchain-anthropic"
        )
        return module.ChatAnthropic(base_url=url, max_retries=0, **common)
    module = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    is_new = api == "responses"
    return module.ChatOpenAI(
        base_url=f"{url}/v1", max_retries=0, use_responses_api=is_new, **common
    )


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", ["chat_completions", "responses", "messages"])
def test_langchain(url: str, api: str, streams: bool) -> None:
    langchain: Any = pytest.importorskip("langchain.agents", reason="pip install langchain")
    from langchain.agents.structured_output import ProviderStrategy

    model = langchain_model(url, api)
    agent = langchain.create_agent(model, tools=[weather], response_format=ProviderStrategy(Report))
    messages = {"messages": [{"role": "user", "content": QUESTION}]}
    if streams:
        parts = list(agent.stream(messages, stream_mode=["messages", "values"]))
        assert sum(mode == "messages" for mode, _ in parts) > 3
        last = [part for mode, part in parts if mode == "values"][-1]
    else:
        last = agent.invoke(messages)
    check(last["structured_response"])


def pydantic_ai_model(url: str, api: str) -> Any:
    if api == "messages":
        anthropic = pytest.importorskip(
            "pydantic_ai.models.anthropic", reason="pip install 'pydantic-ai-slim[anthropic]'"
        )
        from anthropic import AsyncAnthropic
        from pydantic_ai.profiles import ModelProfile
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=url, api_key="x", max_retries=0)
        profile = ModelProfile(supports_json_schema_output=True)
        provider = AnthropicProvider(anthropic_client=client)
        return anthropic.AnthropicModel("tiny", provider=provider, profile=profile)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
    return kind("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", ["chat_completions", "responses", "messages"])
def test_pydantic_ai(url: str, api: str, streams: bool) -> None:
    pydantic_ai: Any = pytest.importorskip(
        "pydantic_ai", reason="pip install 'pydantic-ai-slim[openai]'"
    )
    agent = pydantic_ai.Agent(
        pydantic_ai_model(url, api),
        output_type=pydantic_ai.NativeOutput(Report),
        tools=[weather],
        model_settings={"temperature": 0, "max_tokens": 120},
    )

    async def run() -> Any:
        if not streams:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    check(asyncio.run(run()))


@pytest.mark.parametrize("streams", [False, True])
def test_llama_index(url: str, streams: bool) -> None:
    workflow: Any = pytest.importorskip(
        "llama_index.core.agent.workflow", reason="pip install llama-index-core"
    )
    like: Any = pytest.importorskip(
        "llama_index.llms.openai_like", reason="pip install llama-index-llms-openai-like"
    )
    model = like.OpenAILike(
        model="tiny",
        api_base=f"{url}/v1",
        api_key="x",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
    )

    async def run() -> Any:
        agent = workflow.FunctionAgent(tools=[weather], llm=model, streaming=streams)
        return str(await agent.run(QUESTION))

    check(asyncio.run(run()), REPORT)
