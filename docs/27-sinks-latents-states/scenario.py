"""The run of chapter 27: a model with recurrent states, scheduled by the same loop."""

from pathlib import Path
from typing import Any

from nanoserve import LLM, SamplingParams

# Four of six layers have states, in place of tiny-qwen3's attention.
_STATES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": [*["linear_attention"] * 2, "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "partial_rotary_factor": 0.5,
}
_QUESTION = "What is a KV cache, and what is a block table?"


def states_by_slot(out: Path) -> None:
    """One question three times: two slots, prompts in chunks, no hits, and a preemption."""
    _run(out, _STATES)


def _run(out: Path, overrides: dict[str, Any] | None) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (14, 16, 5)]
    options = {
        "load_format": "dummy",
        "dtype": "float32",
        "attention_backend": "torch",
        "block_size": 8,
        "num_kv_blocks": 6,
        "max_num_seqs": 2,
        "long_prefill_token_threshold": 12,
    }
    with LLM("tiny-qwen3", trace=str(out), hf_overrides=overrides, **options) as llm:
        llm.generate([_QUESTION] * 3, params, use_tqdm=False)
