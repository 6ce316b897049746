"""The runs of chapter 7: a prompt in chunks beside others, and a pool that runs out of blocks."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

_QUESTIONS = ("What is a KV cache?", "What is a block table?", "What is preemption?")


def chunked_prefill(out: Path) -> None:
    """Two sequences decode, and a long prompt is computed in chunks of 16 tokens."""
    short = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    options = {"long_prefill_token_threshold": 16, "num_kv_blocks": 32, "max_num_seqs": 4}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        engine = llm.engine
        for i, question in enumerate(_QUESTIONS[:2]):
            engine.add_request(f"short {i}", question, short)
        engine.step()
        engine.add_request("long", " ".join(_QUESTIONS) * 5, short)
        while engine.has_unfinished_requests():
            engine.step()


def preemption(out: Path) -> None:
    """Three answers grow until the pool is empty; the last is preempted and admitted again.

    The first question is longer, so its sequence takes the last free block some steps before the
    second one needs a block, and the recorded run has frames in which the pool is full.
    """
    questions = ("What is a KV cache, and why does an engine keep it?", *_QUESTIONS[1:])
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (18, 30, 24)]
    options = {"num_kv_blocks": 7, "max_num_seqs": 3}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        llm.chat(chats, params, use_tqdm=False)
