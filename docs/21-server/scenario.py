"""Trace of chapter 21: a client disconnects, and another one gets its slot.

The server's commands are given by hand here, between two steps, where the engine thread takes them
from its queue. So the run is the same each time.
"""

from pathlib import Path

from nanoserve import LLM, SamplingParams
from nanoserve.text.chat import prompts_of

_QUESTIONS = ("What is a KV cache?", "What is a block table?", "What is preemption?")


def client_leaves(out: Path) -> None:
    """Two slots and three clients; the second one disconnects in the middle of its answer."""
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), max_num_seqs=2, num_kv_blocks=12
    ) as llm:
        engine = llm.engine
        chats = [[{"role": "user", "content": question}] for question in _QUESTIONS]
        for name, prompt in zip(
            ("first", "second", "third"), prompts_of(engine, chats), strict=True
        ):
            engine.add_request(name, prompt, params)
        for _ in range(6):
            engine.step()
        engine.abort_request("second")
        while engine.has_unfinished_requests():
            engine.step()
