"""The recorded run of the chapter on tensor parallelism: the decisions of rank 0."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def tensor_parallelism(out: Path) -> None:
    """Three requests and two slots: admissions, growth, an end."""
    prompts = ["What is tensor parallelism?", "What is rank 0?", "What is an all-reduce?"]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    lengths = [12, 6, 9]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    options = {"max_num_seqs": 2, "num_kv_blocks": 12, "max_model_len": 96}
    with LLM(
        "tiny-qwen3", dtype="float32", trace=str(out), tensor_parallel_size=1, **options
    ) as llm:
        llm.chat(conversations, params, use_tqdm=False)
