"""The run of chapter 22: a mixture of experts with random weights, scheduled like any model."""

from pathlib import Path
from typing import Any

from nanoserve import LLM, SamplingParams

_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_QUESTIONS = ("What is a KV cache?", "What is a mixture of experts?", "What is a block table?")


def mixture_of_experts(out: Path) -> None:
    """Sixteen experts a layer, two for each token, in place of tiny-qwen3's feed-forward."""
    _run(out, _EXPERTS)


def _run(out: Path, overrides: dict[str, Any] | None) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (12, 8, 10)]
    options = {
        "load_format": "dummy",
        "dtype": "float32",
        "attention_backend": "torch",
        "num_kv_blocks": 12,
        "max_num_seqs": 3,
    }
    with LLM("tiny-qwen3", trace=str(out), hf_overrides=overrides, **options) as llm:
        llm.generate(list(_QUESTIONS), params, use_tqdm=False)
