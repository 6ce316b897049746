"""Trace of chapter 4."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def tables_interleave(out: Path) -> None:
    """Two sequences take blocks in turn; a third one gets those of the first to finish."""
    prompts = ["A block table lists", "A slot is", "A block pool is"]
    lens = [10, 22, 8]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lens]
    # Without the prefix cache, what was given back last is taken first.
    options = {"block_size": 4, "num_kv_blocks": 14, "max_num_seqs": 2, "max_model_len": 48}
    with LLM("tiny-qwen3", trace=str(out), enable_prefix_caching=False, **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
