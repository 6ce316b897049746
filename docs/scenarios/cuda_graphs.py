"""What the chapter on CUDA graphs shows: decode batches that thin out."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

OUTPUT_LENGTHS = (3, 5, 9, 9, 12)


def decode_sizes(out: Path) -> None:
    """Five requests of different lengths: the decode steps have fewer and fewer rows."""
    prompts = [[i + 40] * 5 for i in range(len(OUTPUT_LENGTHS))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in OUTPUT_LENGTHS]
    options = {"max_num_seqs": 11, "num_kv_blocks": 30, "block_size": 8, "max_model_len": 64}
    with LLM("tiny-qwen3", trace=str(out), **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
