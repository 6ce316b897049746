"""The model that ships with the package: a real one, with real text, against transformers.

Only the first test depends on what the model says; the others ask for agreement alone.
"""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from nanoserve import LLM, RequestOutputKind, SamplingParams
from nanoserve.checkpoint.checkpoint import bundled_checkpoint
from training.corpus import evaluation_sets

PATH = bundled_checkpoint("tiny-qwen3")
GREEDY = SamplingParams(temperature=0, max_tokens=100)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=2000) as llm:
        yield llm


@pytest.fixture(scope="module")
def probes():
    """A few questions of every evaluation set: both languages, sums, several turns."""
    rng = random.Random(0)
    return {
        name: rng.sample(group, min(len(group), 25)) for name, group in evaluation_sets().items()
    }


def test_it_answers_exactly(llm: LLM, probes, by_size: Callable[..., int]) -> None:
    """The full evaluation is `python -m training.evaluate`; this is a sample of it."""
    groups = {name: group[: by_size(10, 25)] for name, group in probes.items()}
    conversations = [probe.messages for group in groups.values() for probe in group]
    outputs = iter(llm.chat(conversations, GREEDY, use_tqdm=False))
    for name, group in groups.items():
        exact = sum(next(outputs).outputs[0].text == probe.expected for probe in group)
        assert exact >= 0.9 * len(group), (name, exact, len(group))


@torch.inference_mode()
def test_its_tokens_are_those_of_transformers(
    llm: LLM, probes, by_size: Callable[..., int]
) -> None:
    reference = Qwen3ForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()
    count = by_size(2, 8)
    conversations = [probe.messages for group in probes.values() for probe in group[:count]]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    for output in outputs:
        prompt, generated = output.prompt_token_ids, output.outputs[0].token_ids
        logits = reference(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 :]
        choices = logits.argmax(-1).tolist()
        if output.outputs[0].finish_reason == "stop":
            assert choices.pop() in llm.engine.input_processor.eos_token_ids
        else:
            choices.pop()
        assert choices == generated


def test_its_text_is_that_of_transformers_tokenizer(llm: LLM, probes) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    conversations = [probe.messages for group in probes.values() for probe in group[:4]]
    for output, messages in zip(
        llm.chat(conversations, GREEDY, use_tqdm=False), conversations, strict=True
    ):
        completion = output.outputs[0]
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.finish_reason == "stop" and "<|" not in completion.text
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert output.prompt == rendered
        assert output.prompt_token_ids == tokenizer.encode(rendered, add_special_tokens=False)


def test_chinese_and_emoji_stream_without_broken_characters(llm: LLM) -> None:
    """Its tokens split characters, so a piece may come late, but never broken."""
    engine, text = llm.engine, "什么是 KV 缓存？🚀👩‍🚀 块表 é"
    ids = engine.tokenizer.encode(text)
    assert any("\ufffd" in engine.tokenizer.decode([token_id]) for token_id in ids)
    params = SamplingParams(temperature=0, max_tokens=100, output_kind=RequestOutputKind.DELTA)
    question = engine.tokenizer.apply_chat_template([{"role": "user", "content": "块表是什么？"}])
    engine.add_request("stream", engine.tokenizer.encode(question, False), params)
    pieces, token_ids = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            pieces.append(output.outputs[0].text)
            token_ids += output.outputs[0].token_ids
    assert "".join(pieces) == engine.tokenizer.decode(token_ids)
    assert "" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_a_second_turn_finds_the_first_in_the_cache(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is a block table?"}]
    first = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "什么是调度器？"},
    ]
    second = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    shared = len(first.prompt_token_ids) + len(first.outputs[0].token_ids)
    assert second.metrics.num_cached_prompt_tokens >= shared // 16 * 16 - 16


def test_its_defaults_are_its_makers(llm: LLM) -> None:
    assert llm.get_default_sampling_params().temperature == 0
    output = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], use_tqdm=False)[0]
    assert output.outputs[0].token_ids


@pytest.mark.parametrize(
    "messages",
    [
        "What is a KV cache?",
        ["What is a KV cache?"],
        {"role": "user", "content": "hello"},
        [{"content": "hello"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        5,
        [],
    ],
    ids=str,
)
def test_messages_that_are_no_conversation_are_refused(llm: LLM, messages) -> None:
    with pytest.raises(ValueError):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


def test_text_that_is_no_text_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="cannot be tokenized"):
        llm.generate("a lone surrogate \ud800", GREEDY, use_tqdm=False)
