"""The settings of less common architectures in `config.json`, with their defaults.

The table has the format of `_SETTINGS` in `nanoserve.checkpoint.config_json`.
"""

from typing import Any

_GEMMA = {
    "attention_bias": False, "tie_word_embeddings": True, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "use_bidirectional_attention": False,
}  # fmt: skip
_GATED_DELTA = {
    "attention_bias": False, "head_dim": 256, "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25, "layer_types": None, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "attn_output_gate": True,
}  # fmt: skip
_GLM = {
    "attention_bias": True, "head_dim": 128, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
# Their `attention_bias` means q, k and v alone.
WITHOUT_O_BIAS = ("GlmForCausalLM", "Glm4ForCausalLM")
_DEEPSEEK = {
    "attention_bias": False, "rope_theta": 10_000.0, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
}  # fmt: skip
OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"sliding_window": 4096, "rope_theta": 10_000.0},
    "MixtralForCausalLM": {
        "sliding_window": None, "num_experts": 8, "num_local_experts": None,
        "num_experts_per_tok": 2, "rope_theta": 1e6,
    },
    "Qwen2MoeForCausalLM": {
        "qkv_bias": True, "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 28, "layer_types": None,
        "num_experts": 60, "num_local_experts": None, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
        "rope_theta": 10_000.0,
    },
    "Qwen3MoeForCausalLM": {
        "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
        "num_experts": 128, "num_local_experts": None, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
        "rope_theta": 10_000.0,
    },
    "Qwen3NextForCausalLM": {
        **_GATED_DELTA,
        "num_experts": 512, "num_local_experts": None, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None,
    },
    "Qwen3_5ForCausalLM": {**_GATED_DELTA, "mrope_section": None},
    "Qwen3_5MoeForCausalLM": {  # all layers have experts, so intermediate_size has no effect
        **_GATED_DELTA,
        "mrope_section": None,
        "intermediate_size": 5632, "num_experts": 256, "num_local_experts": None,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
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
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "GraniteForCausalLM": {
        "attention_bias": False, "mlp_bias": False, "rope_theta": 10_000.0,
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
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
    "Olmo2ForCausalLM": {"attention_bias": False, "rope_theta": 10_000.0},
    "SmolLM3ForCausalLM": {
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": None, "layer_types": None,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "rope_theta": 2e6,
    },
    "MiniCPMForCausalLM": {
        "attention_bias": False, "tie_word_embeddings": True, "rope_theta": 10_000.0,
        "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, "sparse_config": None,
    },
    # transformers does not read `scoring_func`, nor V2's `norm_topk_prob`; DeepSeek's code does.
    "DeepseekV2ForCausalLM": {
        **_DEEPSEEK,
        "mlp_bias": False, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": None, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
        "topk_method": "greedy", "scoring_func": "softmax", "n_group": None, "topk_group": None,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    },
    "DeepseekV3ForCausalLM": {
        **_DEEPSEEK,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "rope_interleave": True, "num_nextn_predict_layers": 1,
    },
}  # fmt: skip
