"""Trace of the chapter on async scheduling: what a synchronous loop knows, and when."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

# The largest number of tokens of each answer. That of the sum is shorter, and ends by EOS.
LIMITS = {"What is a KV cache?": 8, "What is 12 + 30?": 60, "Who are you?": 24, "Who made you?": 10}


def ends_of_both_kinds(out: Path) -> None:
    """Three slots and four answers, of which three end by their length and one by EOS."""
    chats = [[{"role": "user", "content": question}] for question in LIMITS]
    params = [SamplingParams(temperature=0, max_tokens=limit) for limit in LIMITS.values()]
    options = {"dtype": "float32", "num_kv_blocks": 24, "max_num_seqs": 3}
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        llm.chat(chats, params, use_tqdm=False)
