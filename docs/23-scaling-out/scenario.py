"""The run of chapter 23: a pipeline in which steps alternate between groups of sequences."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def two_stages(out: Path) -> None:
    """Four questions on two stages: two steps are in flight, with two sequences each."""
    questions = (
        "What is a KV cache?",
        "What is a block table?",
        "What is preemption?",
        "What is a step?",
    )
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 5, 7, 6)]
    options = {"num_kv_blocks": 24, "max_num_seqs": 4, "max_model_len": 96}
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), pipeline_parallel_size=2, **options
    ) as llm:
        llm.chat(chats, params, use_tqdm=False)
