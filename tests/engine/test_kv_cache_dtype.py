"""`kv_cache_dtype`: in 8 bits an engine says nearly the same, whatever it makes of its requests."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager

QUESTIONS = [
    "What is a KV cache?",
    "What is a block table?",
    "Why is decoding bound by memory?",
    "What is continuous batching?",
    "What does the scheduler do?",
    "What is a prefix cache?",
]
BEGINNING = "Here is a question about serving language models. Please answer it in one sentence. "
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def open_llm(kv_cache_dtype: str, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 400, "max_model_len": 384}
    return LLM("tiny-qwen3", kv_cache_dtype=kv_cache_dtype, **defaults | options)


def ask(llm: LLM, questions: Sequence[str], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    messages = [[{"role": "user", "content": BEGINNING + question}] for question in questions]
    return llm.chat(messages, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def greedy(by_size: Callable[..., int]) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=by_size(8, 16, 24), ignore_eos=True)


@pytest.fixture(scope="module")
def alone(
    greedy: SamplingParams, by_size: Callable[..., tuple[str, ...]]
) -> dict[str, list[list[int]]]:
    """What each question is answered when nothing else is there, by the type of the KV cache.

    Numba compiles attention for each type, for seconds.
    """
    answers = {}
    for dtype in by_size(("auto", "int8"), ("auto", "int8", "fp8")):
        with open_llm(dtype, enable_prefix_caching=False, max_num_seqs=1) as llm:
            answers[dtype] = tokens(ask(llm, QUESTIONS, greedy))
    return answers


def test_the_bundled_model_answers_as_with_floats(alone: dict[str, list[list[int]]]) -> None:
    """It is sure of itself, so that few of its choices are close."""
    for dtype in alone.keys() - {"auto"}:
        pairs = zip(alone[dtype], alone["auto"], strict=True)
        num_same = sum(ours == theirs for ours, theirs in pairs)
        print(f"{dtype}: {num_same} of {len(QUESTIONS)} answers are the same")
        assert num_same >= len(QUESTIONS) - 2


FEATURES: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of 7": {"long_prefill_token_threshold": 7},
    "a small budget": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    "a pool for one": {"num_kv_blocks": 6, "max_model_len": 96},
    "blocks of 1": {"block_size": 1, "num_kv_blocks": 2000},
    "blocks of 32": {"block_size": 32},
    "a step ahead": {"async_scheduling": True},
    "torch": {"attention_backend": "torch"},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.small(feature=["chunks of 7", "a pool for one", "a step ahead", "torch"])
@pytest.mark.small(dtype=["int8"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_tokens_do_not_depend_on(
    feature: str, dtype: str, greedy: SamplingParams, alone: dict[str, list[list[int]]]
) -> None:
    if feature == "torch" and find_spec("numba") is None:
        pytest.skip("torch's is the one that answered alone")
    with open_llm(dtype, **FEATURES[feature]) as llm:
        first, again = (ask(llm, QUESTIONS, greedy) for _ in range(2))
        stats = llm.stats
    assert tokens(first) == alone[dtype]
    assert tokens(again) == alone[dtype]  # out of the prefix cache, where there is one
    if feature == "a pool for one":
        assert stats.num_preemptions > 0
    elif feature not in ("no prefix cache", "blocks of 32"):
        assert all(output.metrics.num_cached_prompt_tokens > 0 for output in again)


@pytest.mark.small(dtype=["int8"])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_several_completions_are_those_of_single_requests(dtype: str) -> None:
    three = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=12)
    with open_llm(dtype) as llm:
        together = ask(llm, QUESTIONS[:2], three)
    with open_llm(dtype, max_num_seqs=1, enable_prefix_caching=False) as llm:
        in_turn = ask(llm, QUESTIONS[:2], three)
    for ours, theirs in zip(together, in_turn, strict=True):
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]


def prompt_logprobs(dtype: str, prompts: list[list[int]], **options: Any) -> list[float]:
    """Of every token of the prompts but the first ones."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
    with open_llm(dtype, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        logprobs[token_id].logprob
        for output in outputs
        for token_id, logprobs in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        )
    ]


@pytest.fixture(scope="module")
def conversations() -> tuple[list[list[int]], list[float]]:
    """Three questions with their answers, and the log-probabilities of their tokens in floats."""
    with open_llm("auto") as llm:
        answered = llm.chat([[{"role": "user", "content": QUESTIONS[i]}] for i in range(3)], GREEDY)
    prompts = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in answered]
    return prompts, prompt_logprobs("auto", prompts)


@pytest.mark.small(dtype=["int8"])
@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.01), ("fp8", 0.04)])
def test_a_conversation_is_nearly_as_likely_as_with_floats(
    dtype: str, most: float, conversations: tuple[list[list[int]], list[float]]
) -> None:
    """Token by token: int8 is wrong by 0.005 on average, fp8 by 0.02."""
    prompts, exact = conversations
    coded = prompt_logprobs(dtype, prompts)
    errors = [abs(ours - theirs) for ours, theirs in zip(coded, exact, strict=True)]
    mean = sum(errors) / len(errors)
    print(f"{dtype}: {len(errors)} log-probabilities, {mean:.5f} off on average")
    assert len(errors) > 90 and 0 < mean < most
    in_chunks = prompt_logprobs(dtype, prompts, long_prefill_token_threshold=7)
    assert in_chunks == pytest.approx(coded, abs=0.02)


# ---------------------------------------------------------------- sizes, keys, refusals


@pytest.mark.parametrize(("dtype", "least"), [("float32", 3.2), ("bfloat16", 1.6)])
def test_as_much_memory_holds_more_blocks(dtype: str, least: float) -> None:
    """A head of tiny-qwen3 has 32 values: 128 or 64 bytes, or 32 and a scale of 4."""
    num_blocks = {}
    for kv_cache_dtype in ("auto", "int8", "fp8_e4m3"):
        options = {"num_kv_blocks": None, "kv_cache_memory_bytes": 2**20, "max_model_len": 64}
        options |= {"dtype": dtype, "attention_backend": "torch"}  # which compiles nothing
        with open_llm(kv_cache_dtype, **options) as llm:
            runner = llm.engine.executor
            num_blocks[kv_cache_dtype] = runner.num_kv_blocks
            tensors = [x for one in runner.kv_caches for x in (one.values, one.scales)]
            num_bytes = sum(x.nbytes for x in tensors if x is not None)
            block_bytes = num_bytes / (runner.num_kv_blocks + 1)
            assert block_bytes == runner.kv_cache_layout.block_bytes
            assert 2**20 - block_bytes < num_bytes <= 2**20
    assert num_blocks["int8"] == num_blocks["fp8_e4m3"] > least * num_blocks["auto"]


def test_a_prefix_in_another_type_is_another_prefix() -> None:
    hashes = {}
    for dtype in ("auto", "int8", "fp8"):
        with open_llm(dtype, prefix_cache_seed=7, attention_backend="torch") as llm:
            process = llm.engine.input_processor.process
            prompts = [list(range(40)), {"prompt_token_ids": list(range(40)), "cache_salt": "a"}]
            for prompt in prompts:
                (seq,) = process("r", prompt, GREEDY).sequences
                BlockManager(9, 16, prefix_cache_seed=7).lookup(seq)
                hashes[dtype, str(prompt)] = tuple(seq.block_hashes)
                assert seq.block_hashes
    assert len(set(hashes.values())) == len(hashes) == 6


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int4' is not one of .*'int8', 'fp8'"):
        EngineConfig("x", kv_cache_dtype="int4")
    if find_spec("triton") is not None:
        with pytest.raises(ValueError, match="flash"):
            open_llm("int8", attention_backend="flash_attn")


def test_a_model_that_computes_nan_ends_its_request_with_an_error() -> None:
    with open_llm("int8") as llm:
        layer = llm.engine.executor.model.model.layers[0]
        whole = layer.self_attn.qkv_proj.form

        def spoilt(x: torch.Tensor) -> torch.Tensor:
            heads = whole(x)
            heads[:, -1] = torch.nan  # of one value head
            return heads

        layer.self_attn.qkv_proj.form = spoilt
        (output,) = ask(llm, QUESTIONS[:1])
    assert output.outputs[0].finish_reason == "error"
