"""Trace of chapter 2."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def packed_prompts(out: Path) -> None:
    """Record three prompts of different lengths in one step, without padding."""
    questions = ["What is RoPE?", "What is 20 + 22?", "What is a causal mask?"]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0, max_tokens=8)
    # Without the prefix cache: the prompts share a prefix, and each is to be computed as a whole.
    options = {"block_size": 8, "num_kv_blocks": 16, "max_model_len": 64}
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), enable_prefix_caching=False, **options
    ) as llm:
        llm.chat(conversations, params, use_tqdm=False)
