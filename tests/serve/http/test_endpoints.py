"""What is asked at the wrong door: endpoints of others, other methods, too long prompts."""

from typing import Any

import pytest
from serving import JSON, ask, served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve import LLM, SamplingParams
from nanoserve.engine.text_limit import ContextLengthError
from nanoserve.serve.http.unsupported_endpoints import missing_endpoint

CHAT = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 5}
# Paths, the status that they are answered with, and what is to be used instead.
MISSING = [
    ("/responses", 404, "the base URL must end with /v1"),
    ("/v1/embeddings", 400, "--runner pooling"),
    ("/messages", 404, "without /v1"),
    ("/v1/v1/messages", 404, "without /v1"),
    ("/v1/rerank", 400, "--runner pooling"),
    ("/v2/rerank", 400, "/rerank"),
    ("/score", 400, "--runner pooling"),
    ("/classify", 400, "/classify"),
    ("/pooling", 400, "--runner pooling"),
    ("/v1/moderations", 400, "chat completion"),
    ("/v1/load_lora_adapter", 400, "--enable-lora"),
    ("/v1/audio/transcriptions", 400, "text models"),
    ("/v1/images/generations", 400, "text models"),
    ("/v1/files", 400, "nanoserve batch"),
    ("/v1/batches/batch_1", 400, "nanoserve batch"),
    ("/v1/assistants", 400, "/v1/chat/completions"),
    ("/v1/threads/t/runs", 400, "/v1/chat/completions"),
    ("/v1/fine_tuning/jobs", 400, "--lora-modules"),
    ("/v1/vector_stores", 400, "/v1/chat/completions"),
    ("/generate", 400, "/v1/completions"),
    ("/api/chat", 404, "/v1/chat/completions"),
    ("/api/generate", 404, "/v1/completions"),
    ("/api/tags", 404, "/v1/models"),
    ("/api/version", 404, "/version"),
    ("/completion", 404, "/v1/completions"),
    ("/infill", 404, "/v1/completions"),
    ("/props", 404, "max_model_len"),
    ("/slots", 404, "/metrics"),
    ("/docs", 404, "--enable-offline-docs"),
    ("/openapi.json", 404, "--enable-offline-docs"),
    ("/load", 404, "--enable-server-load-tracking"),
    ("/server_info", 404, "--enable-dev-endpoints"),
    ("/ready", 404, "/readyz"),
    ("/sleep", 404, "--enable-dev-endpoints"),
    ("/is_paused", 404, "--enable-dev-endpoints"),
    ("/reset_prefix_cache", 404, "LLM"),
    ("/update_weights", 404, "LLM"),
    ("/chat/completions", 404, "the base URL must end with /v1"),
    ("/v2/chat/completions", 404, "the base URL must end with /v1"),
    ("/openai/v1/models/tiny", 404, "the base URL must end with /v1"),
    ("/nothing", 404, "/v1/chat/completions"),
    ("/" + "x" * 5000, 404, "/v1/chat/completions"),
    ("/%0a%1b", 404, "/v1/chat/completions"),
]


@pytest.mark.parametrize(("path", "status", "told"), MISSING, ids=lambda one: str(one)[:30])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_endpoint_that_there_is_not_says_what_there_is(
    server, path: str, status: int, told: str, method: str
) -> None:
    got, headers, answer = ask(server, path, b"{}", JSON, method)
    assert got == status and headers["content-type"] == "application/json"
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"} and told in error["message"]
    assert len(error["message"]) < 400 and error["message"].isprintable()
    kind = "invalid_request_error" if status == 400 else "not_found_error"
    code = "unsupported_endpoint" if status == 400 else "unknown_endpoint"
    assert (error["type"], error["code"]) == (kind, code)


def test_it_is_known_with_and_without_the_version() -> None:
    for path in ("/v1/embeddings", "/embeddings", "/v1/embeddings/", "/V1/Embeddings", "//v1/x"):
        error = missing_endpoint("POST", path)
        assert (error.status == 400) == ("mbeddings" in path)


def test_another_method_is_told_with_the_right_one(server) -> None:
    for path, method, right in (
        ("/v1/chat/completions", "GET", "POST"),
        ("/v1/completions", "PUT", "POST"),
        ("/v1/models", "POST", "GET"),
        ("/tokenize", "DELETE", "POST"),
    ):
        status, headers, answer = ask(server, path, b"", JSON, method)
        assert status == 405 and right in headers["allow"]
        assert f"use {right}" in answer["error"]["message"].replace("use GET, HEAD", "use GET")


def test_a_key_is_asked_for_first(server_llm) -> None:
    with served(server_llm, api_key=["k"]) as server:
        for path in ("/v1/embeddings", "/nothing"):
            assert ask(server, path, b"{}")[0] == 401


# ---------------------------------------------------------------- too long

LIMIT = 1024
SENTENCE = (
    "This model's maximum context length is {} tokens. However, you requested {} tokens ({} in the "
    "messages, {} in the completion). Please reduce the length of the messages or completion."
)


def told(num_prompt: int, num_output: int, least: str = "") -> str:
    return SENTENCE.format(LIMIT, f"{least}{num_prompt + num_output}", num_prompt, num_output)


def too_long(server, path: str, body: dict[str, Any], param: str) -> str:
    status, _, answer = ask(server, path, body)
    error = answer["error"]
    assert status == 400 and error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == ("context_length_exceeded", param), error
    assert error["message"].endswith(" (context_length_exceeded)")
    return error["message"]


WORDS = {"messages": [{"role": "user", "content": "cache " * 2000}]}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_too_long_is_told_in_the_words_that_clients_know(
    server, server_llm, stream: bool
) -> None:
    tokenizer, more = server_llm.engine.tokenizer, {"stream": stream}
    prompt = tokenizer.apply_chat_template(WORDS["messages"])
    num_tokens = len(tokenizer.encode(prompt, False))
    chat, text = "/v1/chat/completions", "/v1/completions"
    for fields, most in (({}, 1), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 9}, 9)):
        message = too_long(server, chat, WORDS | fields | more, "messages")
        assert message.startswith(told(num_tokens, most))
    num_tokens = len(tokenizer.encode("cache " * 2000))
    message = too_long(server, text, {"prompt": "cache " * 2000} | more, "prompt")
    assert message.startswith(told(num_tokens, 16))
    for prompt in ([5] * 1024, [[5], [5] * 1024]):
        message = too_long(server, text, {"prompt": prompt, "max_tokens": 3} | more, "prompt")
        assert message.startswith(told(1024, 3))
    characters = "\u4e2d" * 200_000  # so many that nobody counts the tokens
    message = too_long(server, text, {"prompt": characters} | more, "prompt")
    assert message.startswith(told(LIMIT, 16, "at least ")) and "200000 characters" in message
    messages = [{"role": "user", "content": "\u4e2d" * 2**20}]
    message = too_long(server, chat, {"messages": messages} | more, "messages")
    assert message.startswith(told(LIMIT, 1, "at least "))
    tools = [{"type": "function", "function": {"name": "f", "description": "a " * 2**19}}]
    body = CHAT | {"tools": tools, "tool_choice": "required"} | more
    assert "maximum context length" in too_long(server, chat, body, "messages")


def test_so_is_a_completion_that_is(server, server_llm) -> None:
    num_tokens = ask(server, "/tokenize", {"messages": CHAT["messages"]})[2]["count"]
    for name in ("max_tokens", "max_completion_tokens"):
        body = CHAT | {name: 5000}
        assert too_long(server, "/v1/chat/completions", body, name).startswith(
            told(num_tokens, 5000)
        )
    body = {"prompt": [5] * 1000, "max_tokens": 25}
    assert too_long(server, "/v1/completions", body, "max_tokens").startswith(told(1000, 25))
    assert ask(server, "/v1/completions", body | {"max_tokens": 24})[0] == 200


def test_a_program_hears_the_same(server_llm) -> None:
    with LLM("tiny-qwen3", max_model_len=32, num_kv_blocks=16) as llm:
        for prompt in ([5] * 32, "cache " * 40):
            with pytest.raises(ContextLengthError, match="maximum context length is 32 tokens"):
                llm.generate(prompt, SamplingParams(max_tokens=4), use_tqdm=False)
        with pytest.raises(ContextLengthError, match=r"\(32 in the messages, 4 in the completion"):
            llm.generate([5] * 32, SamplingParams(max_tokens=4), use_tqdm=False)
        with pytest.raises(ContextLengthError, match="maximum context length"):
            llm.chat([{"role": "user", "content": "cache " * 40}], use_tqdm=False)
