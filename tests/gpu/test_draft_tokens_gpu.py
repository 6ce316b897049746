"""Speculation on an NVIDIA GPU: the tokens of an engine without it, in float32.

pytest -m gpu tests/gpu/test_draft_tokens_gpu.py
"""

import random
from typing import Any

import pytest
import torch
from proposers import Mixed, Oracle, Wrong

pytest.importorskip("triton")

from nanoserve import LLM, SamplingParams
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.head_proposer import HeadProposer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

QUESTIONS = [
    "What is a KV cache?",
    "What is a block table?",
    "What is a prefix cache?",
    "What is 3 plus 4?",
    "Who are you?",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=60),
    SamplingParams(temperature=1, seed=4, top_p=0.9, max_tokens=60, repetition_penalty=1.1),
]
METHODS = [
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "draft_model", "model": "tiny-qwen3-draft", "dtype": "float32"},
    {"method": "hidden_head", "model": "tiny-qwen3"},
]
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cuda", "num_kv_blocks": 400}


def answers(llm: LLM, times: int, conversations: list[Any] | None = None) -> list[list[int]]:
    if conversations is None:
        conversations = [[{"role": "user", "content": text}] for text in QUESTIONS]
    conversations = conversations * times
    params = [PARAMS[i % len(PARAMS)] for i in range(len(conversations))]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def asked_again(llm: LLM) -> list[list[dict[str, str]]]:
    """A question, its answer and the question once more: what comes next has been there before."""
    questions = [[{"role": "user", "content": text}] for text in QUESTIONS]
    outputs = llm.chat(questions, PARAMS[0], use_tqdm=False)
    return [
        [*question, {"role": "assistant", "content": output.outputs[0].text}, *question]
        for question, output in zip(questions, outputs, strict=True)
    ]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("drafts", METHODS, ids=lambda drafts: drafts["method"])
def test_answers_are_those_without_draft_tokens(
    drafts: dict[str, Any], enforce_eager: bool, ahead: bool
) -> None:
    drafts = {"adaptive": False, "enforce_eager": enforce_eager} | drafts
    with LLM("tiny-qwen3", **COMMON) as llm:
        conversations = asked_again(llm)
        expected = answers(llm, 3, conversations)
    options = COMMON | {"async_scheduling": ahead}
    with LLM("tiny-qwen3", speculative_config=drafts, **options) as llm:
        assert answers(llm, 3, conversations) == expected
        assert llm.stats.num_accepted_tokens > 100


def test_a_heads_draft_tokens_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call between the first and the last of them synchronises with the GPU, or this raises."""
    draft, shapes = HeadProposer._draft, []

    def without_waiting(*args: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        try:
            drafts = draft(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        shapes.append(drafts.shape)
        return drafts

    monkeypatch.setattr(HeadProposer, "_draft", without_waiting)
    kinds = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=40),
    ]
    messages = [[{"role": "user", "content": text}] for text in QUESTIONS]
    drafts = METHODS[3] | {"adaptive": False, "num_speculative_tokens": 5}
    with LLM("tiny-qwen3", speculative_config=drafts, **COMMON) as llm:
        llm.chat(messages, [kinds[i % 2] for i in range(len(messages))], use_tqdm=False)
    assert len(shapes) > 5 and max(num_drafts for _, num_drafts in shapes) == 5


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_a_draft_model_fits_beside_a_pool_that_is_sized_by_itself(enforce_eager: bool) -> None:
    """Both pools, and a step in which each row has draft tokens, are within the share."""
    drafts = METHODS[2] | {"adaptive": False, "enforce_eager": enforce_eager}
    options = {"dtype": "float32", "device": "cuda"}
    with LLM("tiny-qwen3", num_kv_blocks=400, **options) as llm:
        conversations = asked_again(llm)
        expected = answers(llm, 3, conversations)
    # Blocks so large that the memory decides how many there are.
    options |= {"gpu_memory_utilization": 0.1, "block_size": 256, "max_num_seqs": 64}
    share = 0.1 * torch.cuda.mem_get_info()[1]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with LLM("tiny-qwen3", speculative_config=drafts, **options) as llm:
        (speculation,) = (e for e in llm.engine.extensions if isinstance(e, Speculation))
        num_kv_blocks = llm.engine.executor.num_kv_blocks
        assert speculation.proposer._runner.num_kv_blocks == num_kv_blocks < 2**19
        assert 0.5 * share < torch.cuda.memory_allocated() - before
        assert answers(llm, 3, conversations) == expected
        assert llm.stats.num_accepted_tokens > 0
        assert torch.cuda.max_memory_allocated() - before <= share


@pytest.mark.parametrize(
    ("enforce_eager", "capture_sampling"),
    [(True, False), (False, False), (True, True), (False, True)],
    ids=["eager", "graphs", "sampling in graphs", "both"],
)
def test_whatever_is_drafted(enforce_eager: bool, capture_sampling: bool) -> None:
    """Right, wrong and too many, in a pool for few, one step ahead."""
    options = COMMON | {"max_num_seqs": 7, "num_kv_blocks": 60, "max_model_len": 256}
    options |= {"capture_sampling": capture_sampling}
    drafts = {"method": "ngram", "adaptive": False, "enforce_eager": enforce_eager}
    with (
        LLM("tiny-qwen3", **options) as reference,
        LLM("tiny-qwen3", speculative_config=drafts, **options) as llm,
    ):
        expected = answers(reference, times=4)
        vocab_size = llm.engine.model_config.vocab_size
        oracle = Oracle(reference)
        proposers = [oracle, oracle, Wrong(vocab_size)]
        (speculation,) = (e for e in llm.engine.extensions if isinstance(e, Speculation))
        speculation.proposer = Mixed(random.Random(0), vocab_size, proposers)
        assert answers(llm, times=4) == expected
        assert llm.stats.num_accepted_tokens > 20
