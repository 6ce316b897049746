"""Templates of a server, and what its flags say to browsers."""

import json
import urllib.request
from typing import Any

import pytest
from serving import Served, served

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve.cli.serve import parse_args
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.settings import ServerSettings

TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ note }}{{ tools or '' }}"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server():
    origins = parse_args(["--allowed-origins", '["*"]']).allowed_origins
    kwargs = {"default_chat_template_kwargs": {"note": "N"}, "allowed_origins": origins}
    llm = AsyncLLM("tiny-qwen3", num_kv_blocks=64, max_model_len=512, chat_template=TEMPLATE)
    with served(llm, **kwargs) as one:
        yield one
    llm.shutdown()


def ask(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    content, headers = json.dumps(body).encode(), {"content-type": "application/json"}
    return json.load(
        urllib.request.urlopen(urllib.request.Request(server.url + path, content, headers))
    )


def prompt_of(server: Served, **more: Any) -> str:
    tokens = ask(server, "/tokenize", HELLO | more)["tokens"]
    return ask(server, "/detokenize", {"tokens": tokens})["prompt"]


def test_a_server_has_the_template_and_the_arguments_that_it_was_given(server: Served) -> None:
    assert prompt_of(server) == "Hi|N"
    assert prompt_of(server, chat_template_kwargs={"note": "M"}) == "Hi|M"
    assert prompt_of(server, chat_template_kwargs={"other": 1}) == "Hi|N"
    usage = ask(server, "/v1/chat/completions", HELLO)["usage"]
    assert usage["prompt_tokens"] == ask(server, "/tokenize", HELLO)["count"]


def test_tools_are_shown_by_the_template_that_was_given(server: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert "'name': 'f'" in prompt_of(server, tools=[tool])


def test_origins_of_vllms_form_are_allowed(server: Served) -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    url = f"{server.url}/v1/chat/completions"
    asked = urllib.request.Request(url, None, headers, method="OPTIONS")
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("kwargs", [[], {"messages": 1}, {"chat_template": "x"}, {1: 2}], ids=str)
def test_arguments_of_templates_that_are_none_are_refused(kwargs: Any) -> None:
    with pytest.raises(ValueError, match="default_chat_template_kwargs"):
        ServerSettings(default_chat_template_kwargs=kwargs)
