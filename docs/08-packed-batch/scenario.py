"""The run of the chapter on the packed batch."""

from pathlib import Path

from nanoserve import LLM, SamplingParams


def packed_batch(out: Path) -> None:
    """Two short questions are answered while a long conversation is prefilled in chunks."""
    conversations = [
        [{"role": "user", "content": "What is a KV cache?"}],
        [{"role": "user", "content": "Who are you?"}],
        [
            {"role": "user", "content": "What is a block table?"},
            {"role": "assistant", "content": "It lists the physical block of each logical block."},
            {"role": "user", "content": "What is chunked prefill?"},
            {"role": "assistant", "content": "A long prompt is computed over several steps."},
            {"role": "user", "content": "What is a packed batch?"},
        ],
    ]
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 20, "block_size": 8}
    with LLM(
        "tiny-qwen3",
        dtype="float32",
        trace=str(out),
        num_kv_blocks=40,
        max_model_len=160,
        **options,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        llm.chat(conversations, params, use_tqdm=False)
