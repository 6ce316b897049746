"""Draft tokens on two ranks: rank 0 proposes them, and both compute."""

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams

PROMPTS = [[i, i + 1, i + 2] * 6 for i in range(1, 11)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=40, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1, seed=6, max_tokens=40, repetition_penalty=1.2, n=2),
    SamplingParams(temperature=0, max_tokens=40, frequency_penalty=0.5, min_tokens=10),
    SamplingParams(temperature=0, max_tokens=40, bad_words=["a"], logit_bias={7: 2.0}),
]


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS * 2, use_tqdm=False)
    return [[(c.token_ids, c.text, c.finish_reason) for c in output.outputs] for output in outputs]


@pytest.mark.size("full")
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_two_ranks_answer_as_one_without_draft_tokens(method: str, tmp_path: Path) -> None:
    make_qwen3(tmp_path, vocab_size=2048)
    options: dict[str, Any] = {"tokenizer": "tiny-qwen3", "num_kv_blocks": 40, "block_size": 4}
    with LLM(tmp_path, **options) as llm:
        expected = answers(llm)
    config: dict[str, Any] = {"method": method, "adaptive": False, "num_speculative_tokens": 4}
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
    else:
        config |= {"model": str(tmp_path)}
    with LLM(
        tmp_path,
        tensor_parallel_size=2,
        async_scheduling=True,
        speculative_config=config,
        **options,
    ) as llm:
        assert answers(llm) == expected
        stats = llm.stats
    assert stats.num_draft_tokens > 50
    assert method == "ngram" or stats.num_accepted_tokens > 100
