"""Templates of a server, and what its flags say to browsers."""

import json
import logging
import urllib.request
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from serving import Served, served
from serving import ask as answer_to

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from nanoserve.cli.serve import parse_args
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.protocol import ChatBody, Rendering
from nanoserve.serve.http.settings import ServerSettings
from nanoserve.serve.http.templates import Templates
from nanoserve.text.fallback_template import CHATML, PLAIN, fallback_for
from nanoserve.text.tokenizer import Tokenizer

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


def test_a_request_has_precedence_over_the_server_and_its_effort_is_in_between() -> None:
    def arguments(**fields: Any) -> Any:
        variables = {"enable_thinking": False, "note": "N"}
        body = ChatBody(messages=[], **fields)
        body.render_with(Rendering(variables=variables))
        return body.template_arguments("{{ enable_thinking }}")

    assert arguments() == {"enable_thinking": False, "note": "N"}
    assert arguments(reasoning_effort="high")["enable_thinking"] is True
    own = {"chat_template_kwargs": {"enable_thinking": False}}
    assert arguments(reasoning_effort="high", **own)["enable_thinking"] is False


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


# ---------------------------------------------------------------- templates of requests

OWN = "{% for m in messages %}({{ m.content }}){% endfor %}"


def test_a_request_brings_no_template_unless_the_server_trusts_it(server: Served) -> None:
    for path in ("/tokenize", "/v1/chat/completions"):
        status, _, answer = answer_to(server, path, HELLO | {"chat_template": OWN})
        assert status == 400 and answer["error"]["param"] == "chat_template"
        assert "--trust-request-chat-template" in answer["error"]["message"]
    with served(server.api.llm, trust_request_chat_template=True) as trusting:
        assert prompt_of(trusting, chat_template=OWN) == "(Hi)"
        assert prompt_of(trusting) == "Hi|"
        usage = ask(trusting, "/v1/chat/completions", HELLO | {"chat_template": OWN})["usage"]
        assert usage["prompt_tokens"] == len(
            ask(trusting, "/tokenize", {"prompt": "(Hi)"})["tokens"]
        )
        looking = "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}"
        assert prompt_of(trusting, chat_template=looking) == "[Hi]"
        for wrong, what in (
            ("{% for %}", "not valid Jinja"),
            ("{{ raise_exception('no king') }}{{ messages }}", "no king"),
            ("{{ messages.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "unsafe"),
        ):
            status, _, answer = answer_to(trusting, "/tokenize", HELLO | {"chat_template": wrong})
            assert status == 400 and what in answer["error"]["message"], answer
        # It is no name of a file on the server.
        assert prompt_of(trusting, chat_template=__file__) == __file__
        shows = "{{ messages[0].content }}{{ tools }}<tool_call>"
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        asked = HELLO | {"tools": [tool]}
        assert answer_to(trusting, "/v1/chat/completions", asked)[0] == 400
        asked |= {"chat_template": shows, "rendering": "x"}
        assert answer_to(trusting, "/v1/chat/completions", asked)[0] == 200


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
LOOKS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}[{{ p.type }} {{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("kind", "of_text", "of_parts"),
    [
        ("auto", "[text Hi]", "[text a][text b]"),
        ("openai", "[text Hi]", "[text a][text b]"),
        ("string", "Hi", "a\nb"),
    ],
)
def test_a_template_gets_content_in_the_form_that_was_chosen(
    server: Served, kind: str, of_text: str, of_parts: str
) -> None:
    settings = {"trust_request_chat_template": True, "chat_template_content_format": kind}
    with served(server.api.llm, **settings) as one:
        assert prompt_of(one, chat_template=LOOKS) == of_text
        messages = [{"role": "user", "content": PARTS}]
        assert prompt_of(one, messages=messages, chat_template=LOOKS) == of_parts
        begun = [*messages, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}]
        more = {"continue_final_message": True, "add_generation_prompt": False}
        text = prompt_of(one, messages=begun, chat_template=LOOKS, **more)
        assert text == of_parts + ("It is " if kind == "string" else "[text It is ")
        typed = [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]
        tokens = ask(one, "/tokenize", {"messages": typed, "chat_template": LOOKS})["tokens"]
        special = server.api.llm.engine.tokenizer.special_tokens.id_of("<|im_end|>")
        assert len(tokens) > 1 and special not in tokens
    with pytest.raises(ValueError, match="chat_template_content_format"):
        ServerSettings(chat_template_content_format="xml")
    args = parse_args(["--chat-template-content-format", kind, "--trust-request-chat-template"])
    assert args.chat_template_content_format == kind and args.trust_request_chat_template


# ---------------------------------------------------------------- models without a template

TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi <|im_end|>"},
    {"role": "assistant", "content": "Hello"},
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without its template."""
    folder = tmp_path_factory.mktemp("bare") / "model"
    copytree(bundled_checkpoint("tiny-qwen3"), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
    return folder


def test_a_model_without_a_template_has_a_generic_one(bare: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    llm = AsyncLLM(str(bare), num_kv_blocks=64, max_model_len=512)
    with served(llm) as one:
        assert "ChatML" in caplog.text and "--chat-template FILE" in caplog.text
        begun = "<|im_start|>user\nHi<|im_end|>\n"
        assert prompt_of(one) == begun + "<|im_start|>assistant\n"
        assert prompt_of(one, add_generation_prompt=False) == begun
        # What users write is no special token.
        typed = ask(one, "/tokenize", {"messages": TURNS})["tokens"]
        end = llm.engine.tokenizer.special_tokens.id_of("<|im_end|>")
        assert typed.count(end) == 3
        answer = ask(one, "/v1/chat/completions", HELLO | {"logit_bias": {str(end): 100}})
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop" and choice["message"]["content"] == ""
        assert choice["stop_reason"] in (None, end)
    llm.shutdown()


def test_a_generic_template_is_plain_text_without_special_tokens(bare: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)

    class NoSpecials:
        has_chat_template, chat_template = False, None

        class special_tokens:
            id_of = staticmethod(lambda text: None)

    assert fallback_for(NoSpecials.special_tokens) is PLAIN
    tokenizer: Any = NoSpecials
    assert Templates(ServerSettings(), tokenizer).source == PLAIN.text
    assert "plain text" in caplog.text and "User:" in caplog.text
    known = Tokenizer(bare)
    assert fallback_for(known.special_tokens) is CHATML
    text = known.apply_chat_template(TURNS[:2], chat_template=PLAIN.text)
    assert text == "Be short.\n\nUser: Hi <|im_end|>\n\nAssistant:"
    function = {"name": "f", "arguments": {"a": 1}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    for template in (PLAIN.text, CHATML.text):
        text = known.apply_chat_template([called], chat_template=template)
        assert '\n{"name": "f", "arguments": {"a": 1}}' in text
