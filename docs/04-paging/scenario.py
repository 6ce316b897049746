"""Trace of chapter 4."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def tables_interleave(out: Path) -> None:
    """Record two sequences that take blocks in turn; a third one gets those of the first to end."""
    questions = ["What is a block table?", "What is a slot?", "What is a block pool?"]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (12, 30, 6)]
    # Without the prefix cache, the block that was freed last is taken first.
    options = {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 2, "max_model_len": 64}
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), enable_prefix_caching=False, **options
    ) as llm:
        llm.chat(conversations, params, use_tqdm=False)
