"""The run of chapter 25: KV blocks that leave the pool for the host's memory, and come back."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

_SYSTEMS = (
    "You answer questions about an engine that serves language models, in one sentence each.",
    "You explain to beginners what a scheduler does, and you never use a word twice in a line.",
)


def blocks_come_back(out: Path) -> None:
    """Two conversations take turns in a pool that has room for one of them."""
    one = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    options = {"num_kv_blocks": 6, "max_num_seqs": 2, "kv_offloading_size": 0.01}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        for number, question in enumerate(("What is a slot?", "And a block?", "And a step?")):
            conversation = [
                {"role": "system", "content": _SYSTEMS[number % 2] * 2},
                {"role": "user", "content": question},
            ]
            llm.chat(conversation, one, use_tqdm=False)
