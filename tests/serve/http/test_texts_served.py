"""Texts with a tokenizer of Llama 2's kind, from a prompt to whoever reads: offline and served."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spm_tokenizers import FIRST_BYTE, make_backend, save
from tiny_checkpoints import make_checkpoint
from transformers import LlamaForCausalLM

from nanoserve import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from nanoserve.features.trace.reader import read_trace
from nanoserve.text.detokenizer import Detokenizer

OPTIONS = {"num_kv_blocks": 64, "max_model_len": 256, "dtype": "float32"}
NEWLINE, HALF = FIRST_BYTE + 0x0A, FIRST_BYTE + 0xF0
BACKEND = make_backend()
DELTA = RequestOutputKind.DELTA


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, with a tokenizer of Llama 2's kind."""
    path = tmp_path_factory.mktemp("llama")
    size = BACKEND.get_vocab_size()
    make_checkpoint(LlamaForCausalLM, path, vocab_size=size, eos_token_id=2, bos_token_id=1)
    return save(BACKEND, path)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def forced(token_ids: list[int]) -> Any:
    """A logits processor that leaves one token at a time, and EOS behind them."""

    def process(output: list[int], logits: Any) -> Any:
        wanted = token_ids[len(output)] if len(output) < len(token_ids) else 2
        logits[:wanted] = logits[wanted + 1 :] = float("-inf")
        return logits

    return process


def forced_if_allowed(token_ids: list[int], seen: list[bool]) -> Any:
    """The same while these tokens are allowed; notes in `seen` which ones are."""

    def process(output: list[int], logits: Any) -> Any:
        seen.append(bool(logits[token_ids[len(output)]] > float("-inf")))
        return forced(token_ids if seen[-1] else [0] * len(token_ids))(output, logits)

    return process


def rest_of(prompt: str, text: str) -> list[int]:
    before, whole = BACKEND.encode(prompt).ids, BACKEND.encode(prompt + text).ids
    assert whole[: len(before)] == before
    return whole[len(before) :]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("the is", " Paris."), ("def a(x):\n", "    return x\n"), ("x [", " 1, 2]")],
)
def test_prompt_and_output_are_one_text(llm: LLM, prompt: str, text: str) -> None:
    token_ids = rest_of(prompt, text)
    for more in ({}, {"stop": "zzz"}, {"logprobs": 2, "n": 2}):
        params = SamplingParams(max_tokens=40, logits_processors=[forced(token_ids)], **more)
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert [c.text for c in output.outputs] == [text] * params.n
        assert output.outputs[0].token_ids == token_ids
        pieces = [c.text for o in llm.stream(prompt, params) for c in o.outputs if c.index == 0]
        assert "".join(pieces) == text


def test_an_answer_goes_on_with_its_message(llm: LLM) -> None:
    """A chat's prompt ends with text, special tokens or not; so does one that is continued."""
    messages = [{"role": "user", "content": "the?"}, {"role": "assistant", "content": "the"}]
    params = SamplingParams(max_tokens=9, logits_processors=[forced(rest_of("the", " Paris"))])
    options = {"continue_final_message": True, "add_generation_prompt": False}
    (output,) = llm.chat(messages, params, use_tqdm=False, **options)
    assert output.outputs[0].text == " Paris"
    (output,) = llm.chat(messages[:1], params, use_tqdm=False)
    assert output.outputs[0].text == " Paris"  # as in vLLM


@pytest.mark.parametrize("backend", ["guidance", "xgrammar"])
def test_what_obeys_a_grammar_does_so_with_its_first_space(folder: Path, backend: str) -> None:
    """Also behind a prompt of special tokens alone."""
    pytest.importorskip({"guidance": "llguidance"}.get(backend, backend))
    guides = [
        (StructuredOutputsParams(regex=" (yes|no)"), (" yes", " no")),
        (StructuredOutputsParams(choice=[" yes", " the a"]), (" yes", " the a")),
        (StructuredOutputsParams(choice=["yes", "no"]), ("yes", "no")),
        (StructuredOutputsParams(regex="\n\U0001f600 x"), ("\n\U0001f600 x",)),
    ]
    config = {"backend": backend}
    with LLM(folder, structured_outputs_config=config, **OPTIONS) as llm:
        for guide, texts in guides:
            for prompt in ([1, *BACKEND.encode("the").ids], [1]):
                params = SamplingParams(
                    max_tokens=30, temperature=2.0, seed=1, structured_outputs=guide
                )
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                assert output.outputs[0].finish_reason == "stop"
                assert output.outputs[0].text in texts
                pieces = [o.outputs[0].text for o in llm.stream(prompt, params)]
                assert "".join(pieces) == output.outputs[0].text


def test_a_bad_word_is_held_off_wherever_it_stands(llm: LLM) -> None:
    for before in ("", " ", "\n", "(", "[", '"', "x\n\n", "> ", "\t"):
        token_ids = rest_of("x", before + "Paris")
        seen = []

        params = SamplingParams(
            max_tokens=len(token_ids),
            bad_words=["Paris"],
            logits_processors=[forced_if_allowed(token_ids, seen)],
        )
        llm.generate("x", params, use_tqdm=False)
        assert seen == [True] * (len(token_ids) - 1) + [False], before


@pytest.mark.parametrize(
    "engine_process", [False, pytest.param(True, marks=pytest.mark.size("full"))]
)
def test_broken_characters_and_broken_texts_are_one_request_s_own(
    folder: Path, engine_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tasks; the second one's tokens are a line end, half a character, a word."""
    advance = Detokenizer.advance

    def fail(self: Detokenizer, seq: Any) -> str | None:
        if seq.params.seed == 13 and seq.num_output_tokens >= 3:
            raise ArithmeticError("no text")
        return advance(self, seq)

    monkeypatch.setattr(Detokenizer, "advance", fail)
    bias = dict.fromkeys([NEWLINE, HALF, BACKEND.token_to_id("▁the")], 100)
    normal = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "output_kind": DELTA}
    broken = normal | {"logit_bias": bias, "temperature": 1.5}

    async def read(llm: AsyncLLM, prompt: list[int], **params: Any) -> tuple[Any, int, str]:
        num_tokens, reason, text = 0, None, ""
        try:
            async for output in llm.generate(prompt, SamplingParams(**params)):
                num_tokens += len(output.outputs[0].token_ids)
                text += output.outputs[0].text
                reason = output.outputs[0].finish_reason
        except ArithmeticError as error:
            return error, num_tokens, reason
        return reason, num_tokens, text

    async def main() -> None:
        async with AsyncLLM(folder, engine_process, **OPTIONS) as llm:
            first, cut, failed, last = await asyncio.gather(
                read(llm, [5, 6], **normal),
                read(llm, [5, 7], seed=1, **broken),
                read(llm, [5, 8], seed=13, **broken),
                read(llm, [5, 9], **normal),
            )
            assert first[:2] == last[:2] == ("length", 30)
            assert cut[:2] == ("length", 30) and "\ufffd" in cut[2]
            assert isinstance(failed[0], ArithmeticError) and failed[2] == "error"
            assert not llm._detokenizer._streams
            again = await read(llm, [5, 6], **normal)
            assert again == first

    asyncio.run(main())


def test_a_trace_of_broken_characters(folder: Path, tmp_path: Path) -> None:
    """An observer of the steps makes texts, too."""
    token_ids = [*rest_of("x", " the"), NEWLINE, HALF, *rest_of("x", " a")]
    with LLM(folder, trace=tmp_path / "trace.jsonl", **OPTIONS) as llm:
        params = SamplingParams(max_tokens=9, logits_processors=[forced(token_ids)])
        (output,) = llm.generate("x", params, use_tqdm=False)
    assert output.outputs[0].text == " the\ufffd\ufffd a"
    steps = read_trace(tmp_path / "trace.jsonl").steps
    texts = [row["text"] for step in steps for row in step["rows"] if row.get("text")]
    assert "".join(texts).startswith(" the\ufffd\ufffd a")
