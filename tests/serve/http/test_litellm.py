"""LiteLLM as a library, with each of the three APIs, and with one API bridged to another."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from scripted_model import scripted_llm
from serving import served, wait_until

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

pytestmark = pytest.mark.size("full")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXTS = {
    "text": "It is sunny in Paris.",
    "thought": "<think>\nHm.\n</think>\n\nIt is 42.",
    "call": CALL,
    "json": '{"level": 3}',
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": SCHEMA}


class Level(BaseModel):
    level: int


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one
    return pytest.importorskip("litellm", reason="pip install litellm")


@pytest.fixture(scope="module")
def url(litellm: Any) -> Iterator[str]:
    with scripted_llm(max_model_len=2048) as (llm, script):
        script.texts |= TEXTS
        with served(llm, reasoning_parser="qwen3") as server:
            yield server.url


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_completions(litellm: Any, url: str) -> None:
    """By the provider for such servers, and by the one for Anthropic."""
    for provider, base in (("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        asked: dict[str, Any] = {
            "model": f"{provider}/tiny",
            "api_base": base,
            "api_key": "x",
            "max_tokens": 200,
            "num_retries": 0,
        }
        answer = litellm.completion(messages=said("script: thought"), **asked)
        message = answer.choices[0].message
        assert message.content == "It is 42." and message.reasoning_content == "Hm."
        tools = [{"type": "function", "function": FUNCTION}]
        called = litellm.completion(messages=said("script: call"), tools=tools, **asked)
        (call,) = called.choices[0].message.tool_calls
        assert call.function.name == "weather" and "Paris" in call.function.arguments
        history = [*said("script: call"), called.choices[0].message.model_dump()]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "script: text"})
        chunks = list(litellm.completion(messages=history, tools=tools, stream=True, **asked))
        built = litellm.stream_chunk_builder(chunks)
        assert built.choices[0].message.content == TEXTS["text"]
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=said("x y " * 4000), **asked)
        with pytest.raises(litellm.NotFoundError):
            other = asked | {"model": f"{provider}/other"}
            litellm.completion(messages=said("x"), **other)


def test_a_format(litellm: Any, url: str) -> None:
    pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
    asked = {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "max_tokens": 50}
    asked |= {"response_format": Level}
    answer = litellm.completion(messages=said("script: json"), **asked)
    assert Level.model_validate_json(answer.choices[0].message.content) == Level(level=3)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_responses(litellm: Any, url: str, provider: str) -> None:
    asked: dict[str, Any] = {"model": f"{provider}/tiny", "api_base": f"{url}/v1", "api_key": "x"}
    asked["tools"] = [{"type": "function", **FUNCTION}]
    called = litellm.responses(input="script: call", **asked)
    (call,) = [item for item in called.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "script: text"}
    items = [{"role": "user", "content": "script: call"}, call.model_dump(), output]
    events = list(litellm.responses(input=items, stream=True, **asked))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == TEXTS["text"] and events[-1].type == "response.completed"
    if provider == "openai":
        more = {"input": [output], "previous_response_id": called.id}
        answer = litellm.responses(**more, **asked)
        assert answer.output[-1].content[0].text == TEXTS["text"]


@pytest.mark.parametrize("provider", ["anthropic", "hosted_vllm"])
def test_messages(litellm: Any, url: str, provider: str) -> None:
    """The second is bridged, as for Claude Code in front of such a server."""
    base = url if provider == "anthropic" else f"{url}/v1"
    asked: dict[str, Any] = {"model": f"{provider}/tiny", "api_base": base, "api_key": "x"}
    asked |= {"max_tokens": 200, "tools": [{"name": "weather", "input_schema": SCHEMA}]}
    create = litellm.anthropic.messages.acreate

    async def run() -> None:
        called = await create(messages=said("script: call"), **asked)
        use = called["content"][-1]
        assert use["type"] == "tool_use" and use["input"] == {"city": "Paris"}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "script: text"}
        messages = [
            *said("script: call"),
            {"role": "assistant", "content": called["content"]},
            {"role": "user", "content": [result]},
        ]
        answer = await create(messages=messages, **asked)
        assert answer["content"][-1]["text"] == TEXTS["text"]
        if provider == "anthropic":  # it imports LiteLLM's proxy
            pytest.importorskip("soundfile", reason="pip install soundfile 'litellm[proxy]'")
        stream = await create(messages=messages, stream=True, **asked)
        received = b"".join([one if isinstance(one, bytes) else b"" async for one in stream])
        assert b"message_stop" in received and b"text_delta" in received

    asyncio.run(run())


KEY = "sk-" + "3f9a" * 12  # it refuses to start without one


@pytest.fixture(scope="module")
def proxy(litellm: Any, url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """LiteLLM's proxy in front of the server, with a model for each of its APIs."""
    for name in ("soundfile", "backoff"):
        pytest.importorskip(name, reason="pip install soundfile 'litellm[proxy]'")
    folder = tmp_path_factory.mktemp("proxy")
    bases = {"hosted_vllm": f"{url}/v1", "openai": f"{url}/v1", "anthropic": url}
    models = [
        {
            "model_name": provider,
            "litellm_params": {"model": f"{provider}/tiny", "api_base": base, "api_key": "x"},
        }
        for provider, base in bases.items()
    ]
    (folder / "config.yaml").write_text(json.dumps({"model_list": models}))  # which is YAML, too
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).parent / "litellm"), "--config", "config.yaml"]
    command += ["--port", str(port), "--host", "127.0.0.1"]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            at = f"http://127.0.0.1:{port}"
            wait_until(lambda: process.poll() is not None or is_up(at), seconds=120)
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            yield at
        finally:
            process.terminate()
            process.wait(30)


def is_up(at: str) -> bool:
    try:
        return urllib.request.urlopen(f"{at}/health/liveliness", timeout=5).status == 200
    except OSError:
        return False


def events_of(answer: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def piece_of(event: dict[str, Any]) -> str:
    """The piece of text that an event of one of the three APIs has."""
    if event.get("choices"):
        return event["choices"][0]["delta"].get("content") or ""
    delta = event.get("delta")
    if event.get("type") == "response.output_text.delta":
        return delta
    return delta.get("text", "") if isinstance(delta, dict) else ""


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai", "anthropic"])
def test_the_proxy(proxy: str, provider: str) -> None:
    """The three APIs of the proxy, each answered by one of the three here."""
    question = said("script: text")
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": question, "max_tokens": 100},
        "/v1/responses": {"input": question, "max_output_tokens": 100},
        "/v1/messages": {"messages": question, "max_tokens": 100},
    }
    for path, body in bodies.items():
        for streams in (False, True):
            content = json.dumps(body | {"model": provider, "stream": streams}).encode()
            headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
            request = urllib.request.Request(proxy + path, content, headers)
            answer = urllib.request.urlopen(request, timeout=60).read().decode()
            text = "".join(map(piece_of, events_of(answer))) if streams else answer
            assert TEXTS["text"] in text, (path, answer)
            ends = {"/v1/responses": "response.completed", "/v1/messages": "message_stop"}
            if streams:
                assert ends.get(path, "[DONE]") in answer, (path, answer[-500:])
