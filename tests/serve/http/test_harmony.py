"""Harmony in a server, with a tokenizer that has its special tokens, asked with OpenAI's client."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import served
from tiny_checkpoints import make_qwen3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytest.importorskip("openai", reason="pip install openai")
pytest.importorskip("fastapi", reason="pip install 'nanoserve[serve]'")
pytest.importorskip("llguidance", reason="pip install 'nanoserve[guided]'")
import openai

from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.grammar import count_legal
from nanoserve.features.structured.guidance import Guidance
from nanoserve.features.structured.params import StructuredOutputsParams
from nanoserve.serve.async_llm import AsyncLLM
from nanoserve.serve.http.protocol import ChatBody
from nanoserve.serve.http.tools import harmony
from nanoserve.serve.http.tools.grammar import behind_analysis, constraint_of_tools
from nanoserve.serve.http.tools.parse_result import Parsed
from nanoserve.serve.http.tools.parsers import FORMATS
from nanoserve.serve.http.tools.tool_choice import Function, ToolUse, tool_use_of
from nanoserve.serve.http.tools.tool_constraints import constrain

TEMPLATE = (
    "{%- for message in messages %}{{- '<|start|>' + message.role + '<|message|>' + "
    "(message.content or '') + '<|end|>' }}{%- endfor %}{{- '<|start|>assistant' }}"
    "{#- tools: to=functions.x<|channel|>commentary #}"
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "How will the weather be?"}],
    "max_tokens": 200,
}


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*harmony.SPECIAL_TOKENS, "<|endoftext|>"])
    return tokenizer


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path: Path = tmp_path_factory.mktemp("harmony")
    tokenizer = byte_tokenizer()
    make_qwen3(path, eos_token_id=tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    llm = AsyncLLM(str(path), device="cpu", num_kv_blocks=100, max_num_seqs=4)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def client(llm: AsyncLLM) -> Iterator[openai.OpenAI]:
    with (
        served(llm) as server,  # the template tells both parsers
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def whole(client: openai.OpenAI, **asked: Any) -> tuple[Any, ...]:
    (choice,) = client.chat.completions.create(**ASKED | asked).choices
    message = choice.message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    return message.content or "", message.reasoning or "", calls, choice.finish_reason


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[Any, ...]:
    text, reasoning, reason = "", "", None
    calls: list[list[str]] = []
    for chunk in client.chat.completions.create(**ASKED | asked, stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return text, reasoning, calls, reason


def bias(**of_tokens: float) -> dict[str, float]:
    tokenizer = byte_tokenizer()
    return {str(tokenizer.token_to_id(f"<|{name}|>")): x for name, x in of_tokens.items()}


@pytest.mark.parametrize("skips", [None, True])
def test_channels_are_told_apart(client: openai.OpenAI, skips: bool | None) -> None:
    """A random model, which a grammar makes think and answer; thoughts soon end."""
    num_thoughts = num_answers = 0
    for seed in range(6):
        extra = {"guided_regex": "(yes|no)"}
        extra |= {} if skips is None else {"skip_special_tokens": skips}
        asked = {"extra_body": extra, "seed": seed, "temperature": 1.0, "logit_bias": bias(end=6)}
        content, reasoning, calls, reason = whole(client, **asked)
        assert not calls and "<|" not in content + reasoning and "final" not in content
        if reason != "length":
            num_answers += 1
            assert content.split("\n")[-1] in ("yes", "no")
        assert streamed(client, **asked) == (content, reasoning, calls, reason)
        num_thoughts += bool(reasoning)
    assert num_thoughts and num_answers


def test_calls_are_told_apart(client: openai.OpenAI) -> None:
    num_calls = 0
    for seed in range(4):
        asked = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "temperature": 1.0}
        asked["logit_bias"] = bias(end=6)
        told = whole(client, **asked)
        assert streamed(client, **asked) == told
        for name, arguments in told[2]:
            num_calls += 1
            assert name == "get_weather" and json.loads(arguments)["city"] in ("Paris", "Rome")
            assert told[3] == "tool_calls"
    assert num_calls


def test_the_end_of_a_call_ends_the_output(client: openai.OpenAI) -> None:
    """Though the model's own files do not say so."""
    asked = {"logit_bias": bias(call=100), "temperature": 0}
    assert whole(client, **asked)[3] == "stop"
    asked["extra_body"] = {"ignore_eos": True}
    assert whole(client, **asked)[3] == "length"


@pytest.fixture(scope="module")
def accepts() -> Callable[[StructuredOutputsParams, str], bool]:
    tokenizer = byte_tokenizer()
    compiler, config = Guidance(tokenizer, 300), StructuredOutputsConfig()

    def accepts(guide: StructuredOutputsParams, text: str) -> bool:
        grammar = compiler.compile(guide.source(config)).start()
        ids = tokenizer.encode(text).ids
        if count_legal(grammar, ids) < len(ids):
            return False
        grammar.accept(ids)
        return grammar.may_end

    return accepts


def test_a_grammar_holds_for_the_last_message(accepts: Any) -> None:
    special_id = byte_tokenizer().token_to_id
    thought = "<|channel|>analysis<|message|>{ Hm.<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    answer = behind_analysis(StructuredOutputsParams(regex=r"a/\d+"), special_id)
    for before in ("", thought, thought + thought):
        assert accepts(answer, f"{before}<|channel|>final<|message|>a/12")
        assert not accepts(answer, f"{before}<|channel|>final<|message|>a12")
    assert not accepts(answer, f"{preamble}<|channel|>final<|message|>a/12"), "it is content, too"
    assert not accepts(answer, "a/12") and not accepts(answer, thought)
    begun = behind_analysis(
        StructuredOutputsParams(regex=r"a/\d+"), special_id, begun="<|channel|>final<|message|>"
    )
    assert accepts(begun, "a/12")
    functions = [Function("get_weather", CITY, True), Function("now", {"type": "object"}, False)]
    header = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>"
    for must_call in (True, False):
        use = ToolUse(FORMATS["openai"], functions, must_call, False, True)
        calls = behind_analysis(constraint_of_tools(use, special_id), special_id)
        assert accepts(calls, thought + preamble + header % "get_weather" + '{"city": "Rome"}')
        assert not accepts(calls, header % "get_weather" + '{"city": "Oslo"}')
        assert accepts(calls, header % "now" + "{}") and not accepts(calls, header % "then" + "{}")
        assert accepts(calls, f"{thought}<|channel|>final<|message|>No.") is not must_call


HEADER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"


def test_behind_thoughts_come_a_call_or_content_in_a_format(accepts: Any) -> None:
    special_id, close = byte_tokenizer().token_to_id, "<|end|><|start|>assistant"
    final, begun = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
    content, call = '{"city": "Rome"}', HEADER + '{"city": "Paris"}'
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    for fields in ({"guided_json": CITY}, {}):
        body = ChatBody(messages=[], tools=strict, **fields)
        use = tool_use_of(strict, None, None, FORMATS["openai"], True)
        assert use is not None
        use = constrain(body, use, special_id)
        guide, has_format = body.constraint, bool(fields)
        assert guide is not None and use.is_either is has_format
        last = behind_analysis(guide, special_id)
        thinking = behind_analysis(guide, special_id, begun=begun)
        for before in ("", f"{begun}Hm.{close}"):
            assert accepts(last, before + call) and accepts(last, f"{before}{final}{content}")
            assert accepts(last, f"{before}{final}Oslo") is not has_format
            said = f"{before}<|channel|>commentary<|message|>I look.{close}"
            assert accepts(last, said + call) is not has_format, "it would be content"
        # A message that the prompt has begun is ended first.
        for after in (call, final + content):
            assert accepts(thinking, f"Hm.{close}{after}") and not accepts(thinking, after)
        told = harmony.parse(f"Hm.{close}{final}{content}", True, True, begun, has_format)
        assert told == Parsed("Hm.", content, [])
        saying = behind_analysis(guide, special_id, begun=final)
        assert accepts(saying, content) is has_format
