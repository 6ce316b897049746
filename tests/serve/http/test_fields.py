"""Fields of other servers, in every place of a request: none that matters is ignored in silence."""

import json
import logging
from itertools import chain
from typing import Any

import pytest
from serving import JSON, ask

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")

from nanoserve import SamplingParams
from nanoserve.compat.request_names import FOREIGN, HARMLESS, PLACES, has_no_effect
from nanoserve.serve.http.errors import ApiError
from nanoserve.serve.http.protocol import ChatBody, CompletionBody
from nanoserve.serve.http.unknown_fields import UnknownNames, check_fields

CHAT = {"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 5}
TEXT = {"prompt": "a", "max_tokens": 2, "temperature": 0}
# What nobody would take for a neutral value.
ODD = {"something": ["odd"]}


def checked(body: dict[str, Any], template: str = "", kind: type = ChatBody) -> None:
    check_fields(kind.model_validate_json(json.dumps(body)), UnknownNames(), template)


def refused(body: dict[str, Any], template: str = "", kind: type = ChatBody) -> ApiError:
    with pytest.raises(ApiError) as caught:
        checked(body, template, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_a_known_field_is_refused_with_advice_unless_it_asks_for_nothing(name: str) -> None:
    for kind, body in ((ChatBody, CHAT), (CompletionBody, TEXT)):
        if name in kind.model_fields:
            continue
        error = refused(body | {name: ODD}, kind=kind)
        assert error.param == name and str(error).startswith(f"{name} is not supported: ")
        assert FOREIGN[name].instead
        for value in (None, *FOREIGN[name].neutral):
            checked(body | {name: value}, kind=kind)


def test_the_table_has_each_name_once_and_means_parameters_that_there_are() -> None:
    assert not FOREIGN.keys() & HARMLESS
    own = {*ChatBody.model_fields} | {*CompletionBody.model_fields}
    assert not own & HARMLESS and own & FOREIGN.keys() == {"prompt", "prompt_embeds"}
    for name, one in FOREIGN.items():
        assert one.ours is None or one.ours in SamplingParams.__dataclass_fields__, name
    for known, foreign in PLACES.values():
        assert not known & foreign.keys()


def test_a_flag_is_no_number() -> None:
    assert has_no_effect(None, ()) and has_no_effect(1.0, (1,)) and has_no_effect(0, (False,))
    assert not has_no_effect(True, (1,)) and not has_no_effect(1, (True,))
    assert str(refused(CHAT | {"best_of": True}))
    checked(CHAT | {"best_of": 3, "n": 3})
    refused(CHAT | {"best_of": 3, "n": 2})


SCHEMA = {"type": "object"}
INNER = {
    "a pattern beside json_object": {"response_format": {"type": "json_object", "pattern": "a"}},
    "TGI's format": {"response_format": {"type": "json", "value": SCHEMA}},
    "an image of Ollama's": {"messages": [{"role": "user", "content": "a", "images": ["x"]}]},
    "a prefix of DeepSeek's": {"messages": [{"role": "assistant", "content": "a", "prefix": True}]},
    "a call of 2023": {
        "messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]
    },
    "Anthropic's schema": {
        "tools": [{"type": "function", "function": {"name": "f", "input_schema": SCHEMA}}]
    },
    "Anthropic's flag": {
        "tool_choice": {"type": "function", "function": {"name": "f"},
                        "disable_parallel_tool_use": True}
    },
    "options of Ollama's": {"options": {"num_predict": 5}},
    "what only openai's client takes": {"extra_body": {"top_k": 5}},
}  # fmt: skip


@pytest.mark.parametrize("name", INNER)
def test_what_stands_inside_a_field_is_looked_at_too(name: str) -> None:
    error = refused(CHAT | INNER[name])
    (field,) = INNER[name]
    assert error.param.startswith(field)
    assert str(error).startswith(f"{error.param} is not supported: ")


def test_what_a_template_looks_at_is_honoured() -> None:
    body = CHAT | INNER["a prefix of DeepSeek's"]
    checked(body, "{% if message.prefix %}")
    checked(body, "{% if message['prefix'] is defined %}")
    refused(body, "{% set prefix = 1 %}")


MISTYPED = [
    ({"temperture": 0.1}, "'temperture'", "temperature"),
    ({"stream_options": {"include_usge": True}}, "stream_options: ", "include_usage"),
    ({"messages": [{"role": "user", "contnet": "a"}]}, "messages: ", "content"),
    ({"messages": [{"role": "user", "content": [{"text": "a", "cache_contrl": 1}]}]},
     "'cache_contrl'", "cache_control"),
    ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
     "tools.function: ", "parameters"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": True}}},
     "response_format.json_schema: ", "strict"),
    ({"chat_template_kwargs": {"enable_thinkng": False}}, "chat_template_kwargs: ",
     "enable_thinking"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "where", "meant"), MISTYPED, ids=lambda one: str(one)[:40])
def test_what_nobody_knows_is_logged_once_without_its_value(
    fields: dict[str, Any], where: str, meant: str, caplog: Any
) -> None:
    unknown = UnknownNames()
    body = ChatBody.model_validate_json(json.dumps(CHAT | fields))
    for _ in range(3):
        check_fields(body, unknown, "{% if enable_thinking %}")
    (told,) = caplog.messages
    assert where in told and told.endswith(f"did you mean {meant}?")


def test_no_client_fills_the_log_or_the_memory(caplog: Any) -> None:
    unknown = UnknownNames()
    for number in range(50):
        names = {f"{number} {i} \n\u001b[31m" + "x" * 10_000: "secret" for i in range(50)}
        check_fields(ChatBody.model_validate(CHAT | names), unknown)
    assert len(caplog.messages) == 201 and len(unknown._logged) == 200
    assert max(map(len, caplog.messages)) < 200 and "secret" not in caplog.text
    assert not any("\n" in told or "\u001b" in told for told in caplog.messages)


def test_what_clients_send_to_say_who_they_are_is_not_logged(caplog: Any) -> None:
    checked(CHAT | dict.fromkeys(HARMLESS, "x"))
    assert not caplog.messages


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_what_is_a_field_of_another_endpoint_is_refused(kind: type) -> None:
    if kind is ChatBody:
        for fields in ({"prompt": "a"}, {"add_special_tokens": True}, {"suffix": "b"}):
            refused(CHAT | fields)
        return
    for fields in (
        {"messages": CHAT["messages"]},
        {"max_completion_tokens": 5},
        {"top_logprobs": 5},
        {"tools": [{}]},
        {"tool_choice": "required"},
        {"chat_template_kwargs": {"a": 1}},
        {"reasoning_effort": "low"},
    ):
        assert refused(TEXT | fields, kind=kind).param == next(iter(fields))
    checked(TEXT | {"top_logprobs": 0, "tools": [], "tool_choice": "auto"}, kind=kind)


# ---------------------------------------------------------------- hints


def hints(template: str, **fields: Any) -> dict[str, Any]:
    return ChatBody.model_validate(CHAT | fields).template_arguments(template)


def test_an_effort_is_given_to_templates_that_look_at_it() -> None:
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        assert hints("{{ reasoning_effort }}", reasoning_effort=effort) == {
            "reasoning_effort": effort
        }
    both = "{{ reasoning_effort }}{% if enable_thinking %}"
    assert hints(both, reasoning_effort="none") == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }
    assert hints("{% if enable_thinking %}", reasoning_effort="low") == {"enable_thinking": True}
    own = {"enable_thinking": True}
    assert hints(both, reasoning_effort="none", chat_template_kwargs=own)["enable_thinking"] is True
    assert hints("{{ verbosity }}", verbosity="low") == {"verbosity": "low"}
    assert hints("plain", reasoning_effort="high", verbosity="low") == {}
    for fields in ({"reasoning_effort": "hihg"}, {"verbosity": "loud"}):
        with pytest.raises(ApiError, match="must be one of"):
            hints("", **fields)


def test_hints_are_taken_and_what_is_none_of_them_is_not(server, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    path = "/v1/chat/completions"
    plain = ask(server, path, CHAT)[2]["choices"]
    for fields in ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}, {"verbosity": "low"}):
        status, _, answer = ask(server, path, CHAT | fields)
        assert status == 200 and answer["choices"] == plain
    status, _, answer = ask(server, path, CHAT | {"reasoning_effort": "hihg"})
    assert status == 400 and answer["error"]["param"] == "reasoning_effort"


# ---------------------------------------------------------------- numbers


INTEGERS = [
    *("n", "top_k", "seed", "max_tokens", "min_tokens", "max_completion_tokens", "top_logprobs"),
    *("prompt_logprobs", "num_speculative_tokens", "priority"),
]


@pytest.mark.parametrize("name", INTEGERS)
def test_five_may_be_written_with_a_point(name: str) -> None:
    for written, value in (("5.0", 5), ("5e0", 5), ("0.0", 0), ("5", 5)):
        body = json.dumps(CHAT)[:-1] + f', "{name}": {written}}}'
        assert getattr(ChatBody.model_validate_json(body), name) == value
        assert type(getattr(ChatBody.model_validate_json(body), name)) is int
    for written in ("5.5", '"5"', "true", "[5]", "1e400", "NaN"):
        with pytest.raises(ValueError, match=name):
            ChatBody.model_validate_json(json.dumps(CHAT)[:-1] + f', "{name}": {written}}}')


def test_so_may_the_integers_of_lists(server) -> None:
    ids = ("stop_token_ids", "allowed_token_ids")
    for name in ids:
        body = CompletionBody.model_validate_json(f'{{"prompt": "a", "{name}": [5.0, 6]}}')
        assert getattr(body, name) == [5, 6]
        for written in ("[5.5]", '["5"]', "[true]", "5.0", "[[5.0]]"):
            with pytest.raises(ValueError, match=name):
                CompletionBody.model_validate_json(f'{{"prompt": "a", "{name}": {written}}}')
    for written, prompt in (
        ("[5.0, 6]", [5, 6]),
        ("[[5, 6.0], [7]]", [[5, 6], [7]]),
        ('"5.0"', "5.0"),
        ('["5.0"]', ["5.0"]),
    ):
        body = CompletionBody.model_validate_json(f'{{"prompt": {written}, "logprobs": 2.0}}')
        assert body.prompt == prompt and body.logprobs == 2
    for written in ("[5.5]", "[[5.0], [5.5]]", "5.0", "[5.0, null]"):
        status, _, answer = ask(server, "/v1/completions", f'{{"prompt": {written}}}'.encode())
        assert status == 400 and answer["error"]["param"] == "prompt"
    status, _, answer = ask(server, "/detokenize", b'{"tokens": [5.0, 6]}')
    assert status == 200 and answer == ask(server, "/detokenize", {"tokens": [5, 6]})[2]


NEUTRAL_CHATS = [
    *({"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}, {"stop": []}, {"echo": False}),
    *({"tools": []}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}, {"n": 1.0}),
    *({"logit_bias": {}}, {"response_format": {"type": "text"}}, {"seed": -1}, {"best_of": 1}),
    *({"modalities": ["text"]}, {"typical_p": 1.0}, {"mirostat": 0}, {"dry_multiplier": 0}),
    *({"include_reasoning": True}, {"return_token_ids": False}, {"options": {}}, {"functions": []}),
    *(
        {"thinking_token_budget": -1},
        {"truncate_prompt_tokens": None},
        {"add_special_tokens": False},
    ),
    {"chat_template_kwargs": {}, "documents": None, "stop_token_ids": [], "bad_words": []},
]


def test_what_asks_for_nothing_is_taken(server) -> None:
    plain = ask(server, "/v1/chat/completions", CHAT)[2]["choices"]
    for fields in NEUTRAL_CHATS:
        status, _, answer = ask(server, "/v1/chat/completions", CHAT | fields)
        assert status == 200 and answer["choices"] == plain, (fields, answer)
    plain = ask(server, "/v1/completions", TEXT)[2]["choices"]
    for fields in ({"logprobs": False}, {"suffix": ""}, {"best_of": 1}, {"use_beam_search": False}):
        status, _, answer = ask(server, "/v1/completions", TEXT | fields)
        assert status == 200 and answer["choices"] == plain, (fields, answer)


# ---------------------------------------------------------------- history


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


def conversation(message: dict[str, Any]) -> dict[str, Any]:
    return ChatBody.model_validate({"messages": [message]}).conversation()[0]


def test_what_agents_send_back_is_taken(server) -> None:
    for arguments in ("", " ", "\n\t", "null", " null ", "{}", " {} ", None, {}):
        (told,) = conversation(call(arguments))["tool_calls"]
        assert told["function"]["arguments"] == {}, arguments
        result = {"role": "tool", "tool_call_id": "c", "content": None}
        messages = [user("a"), call(arguments), result]
        assert ask(server, "/v1/chat/completions", CHAT | {"messages": messages})[0] == 200
    for arguments in ("{", "[1]", "5", '"x"', "nul"):
        messages = [user("a"), call(arguments)]
        assert ask(server, "/v1/chat/completions", CHAT | {"messages": messages})[0] == 400
    for part in (
        {"type": "text", "text": "no"},
        {"text": "no"},
        {"type": "refusal", "refusal": "no"},
        {"type": "input_text", "text": "no"},
        {"type": "output_text", "text": "no", "annotations": [], "logprobs": []},
        "no",
    ):
        assert conversation({"role": "assistant", "content": [part]})["content"] == "no"
    null = {"role": "assistant", "content": [{"type": "text", "text": None}]}
    assert conversation(null)["content"] == ""
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    assert conversation(refusal)["content"] == "no"
    for name in ("reasoning", "reasoning_content"):
        told = conversation({"role": "assistant", "content": "a", name: "b"})
        assert told["reasoning"] == told["reasoning_content"] == "b"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"a": 1}, "must be a string or a list of parts"),
        ([{"type": "image_url", "image_url": {}}], "'image_url', and this model reads only text"),
        ([{"type": "text"}], "must have a string as 'text'"),
        ([{"type": "refusal", "text": "no"}], "must have a string as 'refusal'"),
        ([5], "has a int"),
        ([{"type": ["text"]}], "this model reads only text"),
        (5, "has a int"),
    ],
    ids=str,
)
def test_what_is_no_content_is_told_in_plain_words(content: Any, told: str) -> None:
    with pytest.raises(ApiError, match=told) as caught:
        conversation({"role": "user", "content": content})
    assert caught.value.param == "messages" and "None" not in str(caught.value)


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs=21"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "top_logprobs=-2"),
        ({"logprobs": True, "top_logprobs": -1}, "logprobs", "max_logprobs"),
        ({"stop": ""}, "stop", "omit it"),
        ({"n": 2}, "n", "set a temperature"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens", "maximum context length"),
    ],
    ids=str,
)
def test_a_refusal_says_what_to_do(server, fields: Any, param: str, told: str) -> None:
    status, _, answer = ask(server, "/v1/chat/completions", CHAT | fields)
    assert (
        status == 400 and answer["error"]["param"] == param and told in answer["error"]["message"]
    )


# ---------------------------------------------------------------- token ids


def events(text: bytes) -> list[Any]:
    lines = [line[6:] for line in text.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_token_ids_are_told_to_who_asks(server, server_llm) -> None:
    encode = server_llm.engine.tokenizer.encode
    asked = TEXT | {
        "prompt": ["The KV cache", "A block"],
        "max_tokens": 6,
        "return_token_ids": True,
    }
    _, _, whole = ask(server, "/v1/completions", asked)
    _, _, streamed = ask(server, "/v1/completions", asked | {"stream": True})
    for index, prompt in enumerate(asked["prompt"]):
        choice = whole["choices"][index]
        assert choice["prompt_token_ids"] == encode(prompt) and choice["token_ids"]
        decoded = server_llm.engine.tokenizer.decode(choice["token_ids"])
        assert decoded == choice["text"]
        chunks = [one["choices"][0] for one in events(streamed) if one["choices"]]
        own = [one for one in chunks if one["index"] == index]
        assert [one.get("prompt_token_ids") for one in own][:2] == [encode(prompt), None]
        assert [*chain.from_iterable(one["token_ids"] for one in own)] == choice["token_ids"]
    _, _, echoed = ask(server, "/v1/completions", asked | {"echo": True, "max_tokens": 0})
    assert echoed["choices"][0]["token_ids"] == []

    asked = CHAT | {"temperature": 1, "seed": 1, "n": 2, "return_token_ids": True}
    _, _, whole = ask(server, "/v1/chat/completions", asked)
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    _, _, streamed = ask(server, "/v1/chat/completions", asked | {"stream": True})
    chunks = events(streamed)
    assert [one.get("prompt_token_ids") for one in chunks[:2]] == [whole["prompt_token_ids"], None]
    for choice in whole["choices"]:
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        told = chain.from_iterable(one.get("token_ids", ()) for one in own)
        assert [*told] == choice["token_ids"]
    assert "token_ids" not in json.dumps(ask(server, "/v1/chat/completions", CHAT)[2])


def test_an_answer_may_have_the_clients_own_name(server) -> None:
    _, _, answer = ask(server, "/v1/chat/completions", CHAT | {"request_id": "mine-1"})
    assert answer["id"] == "chatcmpl-mine-1"
    for own in ("", "x" * 129, "a\nb", "\u00e9"):
        status, _, answer = ask(server, "/v1/chat/completions", CHAT | {"request_id": own})
        assert status == 400 and answer["error"]["param"] == "request_id"


def test_requests_have_names(server) -> None:
    for path, method, body in (
        ("/v1/chat/completions", "POST", CHAT),
        ("/v1/chat/completions", "POST", CHAT | {"stream": True}),
        ("/v1/chat/completions", "POST", {}),
        ("/health", "GET", b""),
        ("/nothing", "GET", b""),
    ):
        headers = ask(server, path, body, JSON | {"x-request-id": "my-id:1"}, method)[1]
        assert headers.get_all("x-request-id") == ["my-id:1"]
        made = {ask(server, path, body, JSON, method)[1]["x-request-id"] for _ in range(2)}
        assert len(made) == 2 and all(len(one) == 32 for one in made)
        for own in ("", "x" * 129, "a b", "<script>", "\u00e9"):
            headers = ask(server, path, body, JSON | {"x-request-id": own}, method)[1]
            assert len(headers["x-request-id"]) == 32


def test_an_error_of_the_server_has_a_name_too(server, monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(server.api, "_admit", fail)
    headers = JSON | {"x-request-id": "mine"}
    status, told, answer = ask(server, "/v1/chat/completions", CHAT, headers)
    assert status == 500 and told.get_all("x-request-id") == ["mine"]
    assert "secret" not in json.dumps(answer)


# ---------------------------------------------------------------- /tokenize

MESSAGES = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
TEXT = {"prompt": "What is a KV cache?"}
TOKENIZE = [
    (MESSAGES | {"stream": True}, "stream"),
    (MESSAGES | {"logprobs": True}, "logprobs"),
    (MESSAGES | {"top_logprobs": 3}, "top_logprobs"),
    (TEXT | {"prompt_logprobs": 0}, "prompt_logprobs"),
    (TEXT | {"echo": True}, "echo"),
    (MESSAGES | {"add_special_tokens": True}, "add_special_tokens"),
    (TEXT | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (TEXT | {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (TEXT | {"add_generation_prompt": False}, "add_generation_prompt"),
    (TEXT | {"continue_final_message": True}, "continue_final_message"),
    (TEXT | {"documents": [{"text": "a"}]}, "documents"),
    (TEXT | {"reasoning_effort": "low"}, "reasoning_effort"),
    (TEXT | {"allow_special_tokens": False}, "allow_special_tokens"),
    (TEXT | {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    (TEXT | MESSAGES, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), TOKENIZE, ids=lambda one: str(one)[-40:])
def test_tokenize_refuses_what_it_does_not_do(server, body: Any, param: str) -> None:
    status, _, answer = ask(server, "/tokenize", body)
    assert status == 400 and answer["error"]["param"] == param
    assert param in answer["error"]["message"]


def test_tokenize_takes_a_whole_request_for_a_chat(server, caplog: Any) -> None:
    """The rest of it changes no token of the prompt, and is logged once."""
    plain = ask(server, "/tokenize", MESSAGES)[2]["tokens"]
    rest = {"temperature": 0.5, "max_completion_tokens": 9, "n": 2, "stop": ["a"], "stream": False}
    rest |= {"response_format": {"type": "text"}, "user": "me", "logprobs": False}
    rest |= {"parallel_tool_calls": True, "top_logprobs": 0, "add_special_tokens": False}
    for _ in range(2):
        assert ask(server, "/tokenize", MESSAGES | rest)[2]["tokens"] == plain
    told = [record.getMessage() for record in caplog.records if "/tokenize" in record.getMessage()]
    names = ("max_completion_tokens", "n", "parallel_tool_calls", "response_format", "stop")
    expected = [f"ignored {name!r}: /tokenize generates nothing" for name in names]
    assert sorted(told) == sorted([*expected, "ignored 'temperature': /tokenize generates nothing"])
    neutral = {"tools": [], "add_generation_prompt": True, "tool_choice": "auto", "echo": None}
    assert ask(server, "/tokenize", TEXT | neutral)[0] == 200
