"""Trace of chapter 5: blocks that are shared, kept after their owner's end, and evicted."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

_SYSTEM = (
    "You answer questions on LLM inference for people who are new to it. "
    "Be short, be exact, and use the standard terms."
)


def shared_prefix(out: Path) -> None:
    """Record questions with one system prompt, a long one that evicts, and the prompt again."""
    greedy = SamplingParams(temperature=0, max_tokens=12)
    long = "What is a block table? " * 12
    turns = [
        ["What is a KV cache?", "What is preemption?", "What is a scheduler?"],
        [long],
        ["What is a step?"],
    ]
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), num_kv_blocks=9, max_num_seqs=4) as llm:
        for questions in turns:
            system = [] if questions == [long] else [{"role": "system", "content": _SYSTEM}]
            chats = [[*system, {"role": "user", "content": question}] for question in questions]
            llm.chat(chats, greedy, use_tqdm=False)
