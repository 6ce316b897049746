"""The run of the chapter on CUDA graphs: decode batches with fewer and fewer rows."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

OUTPUT_LENGTHS = {
    "Who are you?": 3,
    "What is a CUDA graph?": 5,
    "What is the dummy block?": 9,
    "What is a KV cache?": 9,
    "What is FlashAttention?": 12,
}


def decode_sizes(out: Path) -> None:
    """Run five requests of different lengths: the decode steps have fewer and fewer rows."""
    conversations = [[{"role": "user", "content": question}] for question in OUTPUT_LENGTHS]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for length in OUTPUT_LENGTHS.values()
    ]
    options = {"max_num_seqs": 11, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 64}
    with LLM("tiny-qwen3", dtype="float32", trace=str(out), **options) as llm:
        llm.chat(conversations, params, use_tqdm=False)
