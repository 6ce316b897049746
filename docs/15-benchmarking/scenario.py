"""The recorded run of the chapter on benchmarking: the tail of a workload."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def benchmark_tail(out: Path) -> None:
    """Six requests of different lengths: at the end one of them runs alone."""
    questions = ["KV cache", "block table", "slot", "batch size", "prefix hit", "token budget"]
    conversations = [[{"role": "user", "content": f"What is a {term}?"}] for term in questions]
    lengths = [4, 8, 6, 28, 5, 7]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    options = {"max_num_seqs": 4, "num_kv_blocks": 24, "max_model_len": 96}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        llm.chat(conversations, params, use_tqdm=False)
