"""The settings of less common architectures in `config.json`, with their defaults.

The table has the format of `_SETTINGS` in `nanoserve.checkpoint.config_json`.
"""

from typing import Any

_GEMMA = {
    "attention_bias": False, "tie_word_embeddings": True, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "use_bidirectional_attention": False,
}  # fmt: skip
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 4096, "rope_theta": 10_000.0},
    "MixtralForCausalLM": {
        "sliding_window": None, "num_experts": 8, "num_local_experts": None,
        "num_experts_per_tok": 2, "rope_theta": 1e6,
    },
    "Qwen3MoeForCausalLM": {
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "num_experts": 128, "num_local_experts": None, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
        "rope_theta": 10_000.0,
    },
    "Phi3ForCausalLM": {"sliding_window": None, "rope_theta": 10_000.0},
    "Gemma2ForCausalLM": {
        **_GEMMA,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "rope_theta": 10_000.0,
    },
    # Its files also have attn_logit_softcapping, which its attention does not use.
    "Gemma3ForCausalLM": {
        **_GEMMA,
        "final_logit_softcapping": None, "sliding_window_pattern": 6,
        "rope_theta": 1e6, "rope_local_base_freq": 10_000.0,
    },
    # In transformers' class, attention_bias is True and every other layer has the window.
    "GptOssForCausalLM": {
        "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "sliding_window": 128, "layer_types": None, "sliding_window_pattern": 2,
        "num_experts": 128, "num_local_experts": None, "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "MiniCPMForCausalLM": {
        "attention_bias": False, "tie_word_embeddings": True, "rope_theta": 10_000.0,
        "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "sparse_config": None,
    },
}  # fmt: skip
