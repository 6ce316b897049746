"""Trace of chapter 1."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def prefill_then_decode(out: Path) -> None:
    """Record two questions at once: a step of many tokens, then steps of one token each."""
    questions = ["What is a KV cache?", "What is 20 + 22?"]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    # Without the prefix cache, so that the second prompt is also computed from its first token.
    options = {"block_size": 8, "num_kv_blocks": 24, "max_model_len": 96}
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), enable_prefix_caching=False, **options
    ) as llm:
        llm.chat(conversations, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
