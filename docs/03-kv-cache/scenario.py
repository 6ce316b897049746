"""Trace of chapter 3."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def cache_grows(out: Path) -> None:
    """Record one sequence, whose blocks are filled by the prompt and then token by token."""
    question = [{"role": "user", "content": "What is a KV cache?"}]
    options = {"block_size": 4, "num_kv_blocks": 12, "max_model_len": 48}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        llm.chat(question, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
