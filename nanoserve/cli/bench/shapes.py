"""The shapes of models, as entries of `config.json`, to be measured with random weights.

Speed does not depend on the values of weights, so a real model is measured without a download.
"""

from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
_QWEN3_600M = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
_QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256,
    "num_key_value_heads": 8, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _stretched(factor: float) -> dict[str, Any]:
    """Return Llama 3's RoPE scaling, for positions beyond its first context length of 8,192."""
    frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    before = {"original_max_position_embeddings": 8192}
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **frequencies, **before}}


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3
    | {"vocab_size": 2048, "hidden_size": 192, "intermediate_size": 448, "num_hidden_layers": 6}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
    "qwen3-0.6b-8l": _QWEN3 | _QWEN3_600M | {"num_hidden_layers": 8, "vocab_size": 16_000},
    "qwen3-0.6b": _QWEN3 | _QWEN3_600M,
    "qwen3-1.7b": _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "qwen3-4b": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
    | {"num_attention_heads": 32},
    "qwen3-8b": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": False},
    "qwen3-30b-a3b": _QWEN3
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2.5-0.5b": _QWEN25
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2},
    "llama-3.2-1b": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"num_attention_heads": 32, "tie_word_embeddings": True, **_stretched(32.0)},
    "llama-3.2-3b": _LLAMA
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "head_dim": 128}
    | {"num_attention_heads": 24, "tie_word_embeddings": True, **_stretched(32.0)},
    "llama-3.1-8b": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128}
    | {"num_attention_heads": 32, "tie_word_embeddings": False, **_stretched(8.0)},
}
