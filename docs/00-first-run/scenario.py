"""The run of chapter 0: one question, answered by the bundled model."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def first_run(out: Path) -> None:
    """Record the question of `worked.output`, with a pool small enough for the picture."""
    question = [{"role": "user", "content": "What is a block table?"}]
    greedy = SamplingParams(temperature=0, max_tokens=100)
    with LLM("tiny-qwen3", dtype="float32", num_kv_blocks=12, trace=str(out)) as llm:
        llm.chat(question, greedy, use_tqdm=False)
