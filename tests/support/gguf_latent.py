"""What llama.cpp's converter makes of DeepSeek V2 and V3, beside `gguf_models`."""

from typing import Any

import torch

OLD = {"attention.key_length_mla": None, "attention.value_length_mla": None}  # and one matrix


def settings(config: Any) -> dict[str, Any]:
    """The settings of a DeepSeek beside the usual ones, and in place of them."""
    is_v3, rope = config.model_type == "deepseek_v3", config.rope_parameters
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": config.qk_rope_head_dim,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": 2 if is_v3 else 1,  # of scoring_func, which transformers omits
        "expert_weights_norm": True if is_v3 else None,
    }
    if rope["rope_type"] != "yarn":
        return found
    return found | {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
    }


def old_settings(config: Any) -> dict[str, Any]:
    """Those that differ in files of before 2025, whose `kv_b_proj` is one matrix."""
    return OLD | {
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
    }


def halves(config: Any, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of `kv_b_proj`, by names: a matrix per head of each; that of keys is transposed."""
    rows = (config.qk_nope_head_dim, config.v_head_dim)
    keys, values = weight.unflatten(0, (-1, sum(rows))).split(rows, dim=1)
    return {"attn_k_b": keys.mT, "attn_v_b": values}
