"""Agents with tools and a type for their answer: each of these frameworks sends both at once."""

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel, Field
from scripted_model import TEMPLATE, Script
from serving import served

pytest.importorskip("openai", reason="pip install openai")
pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

from nanoserve.serve.async_llm import AsyncLLM

pytestmark = pytest.mark.size("full")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REPORT = '{"text": "It is sunny", "level": 3}'
SCRIPT = Script({"How is the weather?": CALL, "sunny in Paris": REPORT})
QUESTION = "How is the weather?"


class Report(BaseModel):
    text: str = Field(max_length=40)
    level: int


EXPECTED = Report(**json.loads(REPORT))
asked: list[str] = []


def weather(city: str) -> str:
    """Tell how the weather is in a city."""
    asked.append(city)
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def url():
    options = {"num_kv_blocks": 400, "max_model_len": 1536, "max_num_seqs": 4}
    llm = AsyncLLM("tiny-qwen3", chat_template=TEMPLATE, logits_processors=[SCRIPT], **options)
    with served(llm) as server:
        yield f"{server.url}/v1"
    llm.shutdown()


@pytest.fixture(autouse=True)
def nothing_asked():
    asked.clear()
    yield
    assert asked == ["Paris"]


@pytest.mark.parametrize("streams", [False, True])
def test_openai_agents(url: str, streams: bool) -> None:
    agents: Any = pytest.importorskip("agents", reason="pip install openai-agents")
    import openai

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            agent = agents.Agent(
                name="reporter",
                model=agents.OpenAIChatCompletionsModel("tiny", client),
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
    assert asyncio.run(run()) == EXPECTED


@pytest.mark.parametrize("streams", [False, True])
def test_langchain(url: str, streams: bool) -> None:
    langchain: Any = pytest.importorskip("langchain.agents", reason="pip install langchain")
    langchain_openai: Any = pytest.importorskip(
        "langchain_openai", reason="pip install langchain-openai"
    )
    from langchain.agents.structured_output import ProviderStrategy

    model = langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model="tiny", temperature=0, max_tokens=120, max_retries=0
    )
    agent = langchain.create_agent(model, tools=[weather], response_format=ProviderStrategy(Report))
    messages = {"messages": [{"role": "user", "content": QUESTION}]}
    if streams:
        *_, last = agent.stream(messages, stream_mode="values")
    else:
        last = agent.invoke(messages)
    assert last["structured_response"] == EXPECTED


@pytest.mark.parametrize("streams", [False, True])
def test_pydantic_ai(url: str, streams: bool) -> None:
    pydantic_ai: Any = pytest.importorskip(
        "pydantic_ai", reason="pip install 'pydantic-ai-slim[openai]'"
    )
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = pydantic_ai.Agent(
        model,
        output_type=pydantic_ai.NativeOutput(Report),
        tools=[weather],
        model_settings={"temperature": 0, "max_tokens": 120},
    )

    async def run() -> Any:
        if not streams:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    assert asyncio.run(run()) == EXPECTED
