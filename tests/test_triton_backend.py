"""`attention_backend="triton"` end to end, in Triton's interpreter, against the torch backend."""

from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import make_qwen3

from nanoserve import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def greedy_tokens(model: Path | str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with LLM(model, dtype="float32", skip_tokenizer_init=True, device="cpu", **options) as llm:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({}, {"block_size": 16}),
        ({"num_key_value_heads": 1}, {"block_size": 32, "max_num_batched_tokens": 16}),
        ({"num_attention_heads": 6, "head_dim": 8}, {"num_kv_blocks": 6, "max_model_len": 64}),
        ({"num_key_value_heads": 4, "head_dim": 40}, {"enable_prefix_caching": False}),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_torch_backend(
    tmp_path: Path, overrides: dict[str, int], options: dict[str, Any]
) -> None:
    make_qwen3(tmp_path, **overrides)
    prompts = [[1], [2] * 17, list(range(40)), [*range(32), 9], [5, 6, 7]]
    options = {"max_num_seqs": 4} | options
    ours = greedy_tokens(tmp_path, prompts, attention_backend="triton", **options)
    assert ours == greedy_tokens(tmp_path, prompts, **options)


def test_so_are_those_of_the_bundled_model() -> None:
    with LLM("tiny-qwen3", device="cpu") as llm:
        question = [{"role": "user", "content": "What is a block table?"}]
        prompt = llm.chat(question, GREEDY, use_tqdm=False)[0].prompt_token_ids
    ours = greedy_tokens("tiny-qwen3", [prompt], attention_backend="triton")
    assert ours == greedy_tokens("tiny-qwen3", [prompt])
