"""Traces of chapter 20: the same requests in the same bytes of KV cache, in 16 bits and in 8."""

from pathlib import Path

from nanoserve import LLM, SamplingParams

_QUESTIONS = ("What is a KV cache?", "What is quantization?", "What is a block table?")
_POOL_BYTES = 144 * 1024


def kv_in_16_bits(out: Path) -> None:
    """Three answers do not fit, so requests are preempted."""
    _run(out, "auto")


def kv_in_8_bits(out: Path) -> None:
    """The three answers fit."""
    _run(out, "int8")


def _run(out: Path, kv_cache_dtype: str) -> None:
    chats = [[{"role": "user", "content": question}] for question in _QUESTIONS]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (24, 30, 24)]
    options = {
        "dtype": "bfloat16",
        "attention_backend": "torch",
        "kv_cache_memory_bytes": _POOL_BYTES,
        "max_num_seqs": 3,
    }
    with LLM("tiny-qwen3", trace=str(out), kv_cache_dtype=kv_cache_dtype, **options) as llm:
        llm.chat(chats, params, use_tqdm=False)
