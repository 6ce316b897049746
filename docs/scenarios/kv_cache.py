"""Trace of chapter 3."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def cache_grows(out: Path) -> None:
    """One sequence: its blocks are filled by the prompt, then token by token."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"block_size": 4, "num_kv_blocks": 12, "max_model_len": 48}
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        llm.generate("The KV cache keeps", params, use_tqdm=False)
