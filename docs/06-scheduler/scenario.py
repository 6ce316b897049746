"""The run of chapter 6: slots that are filled again as soon as they are free."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def continuous_batching(out: Path) -> None:
    """Run five requests of different lengths, at most three at a time."""
    questions = (
        "What is a KV cache?",
        "What is a block table?",
        "What is preemption?",
        "What is a step?",
        "What is chunked prefill?",
    )
    lengths = (3, 8, 16, 7, 5)
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), num_kv_blocks=24, max_num_seqs=3
    ) as llm:
        llm.chat(chats, params, use_tqdm=False)
