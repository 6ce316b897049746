"""Log-probabilities over HTTP: the bytes of tokens, and where they stand in the text."""

import json
from typing import Any

import pytest
from serving import ask

pytest.importorskip("fastapi", reason="a server needs pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40}
CHAT |= {"logprobs": True, "top_logprobs": 3}
CHOICES = ["\N{LLAMA}", "\u4e2d\u6587 \u00e9 \N{LLAMA}\N{LLAMA} a\n", "plain words"]


def chat(server, **fields: Any) -> Any:
    status, _, answer = ask(server, "/v1/chat/completions", CHAT | fields)
    assert status == 200, answer
    return answer["choices"][0]


def complete(server, **fields: Any) -> Any:
    status, _, answer = ask(server, "/v1/completions", {"max_tokens": 8, "logprobs": 5} | fields)
    assert status == 200, answer
    return answer["choices"][0]


def streamed(server, path: str, body: dict[str, Any]) -> list[Any]:
    _, _, text = ask(server, path, body | {"stream": True})
    lines = [line[6:] for line in text.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


@pytest.mark.parametrize("text", CHOICES)
def test_the_bytes_of_a_chats_tokens_join_to_its_text(server, text: str) -> None:
    asked = {"structured_outputs": {"choice": [text]}}
    for more in ({}, {"return_tokens_as_token_ids": True}, {"skip_special_tokens": False}):
        choice = chat(server, **asked, **more)
        content = choice["logprobs"]["content"]
        assert choice["message"]["content"] == text
        assert b"".join(bytes(one["bytes"]) for one in content) == text.encode()
        for one in content:
            if more.get("return_tokens_as_token_ids"):
                assert one["token"].startswith("token_id:")
                continue
            whole = bytes(one["bytes"]).decode("utf-8", "ignore").encode() == bytes(one["bytes"])
            escaped = "".join(f"\\x{byte:02x}" for byte in one["bytes"])
            assert one["token"] == (bytes(one["bytes"]).decode() if whole else escaped)
            assert len(one["top_logprobs"]) == 3
    chunks = streamed(server, "/v1/chat/completions", CHAT | asked)
    pieces = [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
    assert b"".join(bytes(one["bytes"]) for one in pieces) == text.encode()


def test_a_special_token_has_bytes_where_the_text_has_it(server, server_llm) -> None:
    tokenizer = server_llm.engine.tokenizer
    (end,) = tokenizer.encode("<|im_end|>", False)
    forced = {"logit_bias": {str(end): 100}, "ignore_eos": True, "max_tokens": 3}
    for skips in (True, False):
        choice = chat(server, **forced, skip_special_tokens=skips)
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == ["<|im_end|>"] * 3
        joined = b"".join(bytes(one["bytes"]) for one in content)
        assert (
            joined.decode() == choice["message"]["content"] == ("" if skips else "<|im_end|>" * 3)
        )
        choice = complete(server, prompt="a", **forced, skip_special_tokens=skips)
        assert choice["logprobs"]["text_offset"] == ([0] * 3 if skips else [0, 10, 20])


PROMPTS = [
    "\N{LLAMA} is a llama",
    "\u4e2d\u6587\N{LLAMA} a",
    "plain",
    "<|im_start|>user\n\u00e9",
    "e\u0301a",
]


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_lead_into_the_text(server, server_llm, prompt: str, as_ids: bool) -> None:
    tokenizer = server_llm.engine.tokenizer
    ids = tokenizer.encode(prompt)
    for given in (prompt, ids):
        for more in ({"max_tokens": 0}, {"temperature": 2.5, "seed": 3, "ignore_eos": True}):
            choice = complete(
                server, prompt=given, echo=True, return_tokens_as_token_ids=as_ids, **more
            )
            text, shown = choice["text"], choice["logprobs"]
            assert shown["text_offset"] == sorted(shown["text_offset"])
            names = [tokenizer.token_bytes.of(i) for i in ids]
            for number, (token, offset) in enumerate(
                zip(shown["tokens"], shown["text_offset"], strict=True)
            ):
                assert offset < len(text)
                if as_ids:
                    assert token.startswith("token_id:")
                elif token != "<|im_end|>" and not token.startswith("bytes:"):
                    assert text[offset:].startswith(token)
                if number < len(names) and given == prompt and "e\u0301" not in text:
                    before = b"".join(names[:number]).decode("utf-8", "ignore")
                    assert offset == len(before)


def test_a_stop_string_cuts_offsets_with_the_text(server) -> None:
    asked = {"prompt": "What is a KV cache?", "temperature": 0, "max_tokens": 30}
    whole = complete(server, **asked)
    stop = whole["text"][12:16]
    cut = complete(server, **asked, stop=stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    shown = cut["logprobs"]
    assert max(shown["text_offset"]) <= len(cut["text"])
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        rest = cut["text"][offset:]
        assert rest.startswith(token) or token.startswith(rest)


def test_streamed_offsets_are_those_of_the_whole(server) -> None:
    asked = {"prompt": "\N{LLAMA} a", "echo": True, "logprobs": 2, "temperature": 2.5, "seed": 1}
    asked |= {"max_tokens": 40, "ignore_eos": True}
    whole = complete(server, **asked)["logprobs"]
    shown: dict[str, list[Any]] = {"tokens": [], "text_offset": []}
    for chunk in streamed(server, "/v1/completions", asked):
        for name in shown:
            shown[name] += chunk["logprobs"][name] if chunk["logprobs"] else []
    assert shown["tokens"] == whole["tokens"] and shown["text_offset"] == whole["text_offset"]


def test_candidates_are_told_apart_and_the_chosen_one_has_its_own_value(server) -> None:
    num_parts = 0
    for seed in range(4):
        asked = {"prompt": "x", "max_tokens": 60, "temperature": 2.5, "seed": seed}
        shown = complete(server, **asked, logprobs=20)["logprobs"]
        rows = zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True)
        for token, value, top in rows:
            assert len(top) in (20, 21) and top[token] == value
            num_parts += sum(name.startswith("bytes:\\x") for name in top)
    assert num_parts > 20


def test_tokens_of_the_same_text_have_names_of_their_own() -> None:
    from nanoserve.outputs import Logprob
    from nanoserve.serve.http.logprobs import TokenNames, of_completion

    class Known:
        def of(self, token_id: int) -> bytes:
            return [b"a", b"a", b"a", b"\xf0", b"b"][token_id]

    entry = {i: Logprob(-float(i), i + 1, "?") for i in range(5)}
    names = TokenNames(Known(), False, "bytes:")  # type: ignore[arg-type]
    for chosen, expected in (
        (0, {"a": 0, "token_id:1": -1, "token_id:2": -2, "bytes:\\xf0": -3, "b": -4}),
        (2, {"token_id:0": 0, "token_id:1": -1, "a": -2, "bytes:\\xf0": -3, "b": -4}),
        (4, {"a": 0, "token_id:1": -1, "token_id:2": -2, "bytes:\\xf0": -3, "b": -4}),
    ):
        shown = of_completion([chosen], [entry], names, [Known().of(chosen)], [0])
        assert shown["top_logprobs"] == [expected]
        assert shown["token_logprobs"] == [expected[shown["tokens"][0]]]


def test_all_candidates_can_be_had_where_the_engine_allows_it(server_llm, monkeypatch) -> None:
    from serving import served

    processor = server_llm.engine.input_processor
    monkeypatch.setattr(processor, "max_logprobs", processor.vocab_size)
    with served(server_llm) as server:
        content = chat(server, top_logprobs=-1, max_tokens=1)["logprobs"]["content"]
    assert len(content[0]["top_logprobs"]) == processor.vocab_size
