"""Trace of chapter 2."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def packed_prompts(out: Path) -> None:
    """Three prompts of different lengths in one step, without padding."""
    prompts = ["A token is", "The KV cache keeps keys and values", "RoPE turns queries and keys by"]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"block_size": 8, "num_kv_blocks": 24, "max_model_len": 64}
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
