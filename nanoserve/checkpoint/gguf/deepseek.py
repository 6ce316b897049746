"""The settings of DeepSeek V2 and V3 in a GGUF file, which both have the architecture "deepseek2".

Latent attention has two forms in files. Since 2025, they store W_UK and W_UV of each head (see
`nanoserve.checkpoint.gguf.latent`), and describe attention with one KV head: key_length and
value_length are those of the cached vector, and key_length_mla and value_length_mla are a head's.
Older files have one matrix, as many KV heads as heads, and a head's sizes in key_length and
value_length.
"""

from typing import Any

from nanoserve.checkpoint.gguf.settings import Settings
from nanoserve.utils.checks import check_choice, require

_SOFTMAX, _SIGMOID = 1, 2  # in expert_gating_func
# Groups, and groups used, by the number of experts of the published models that have groups. Files
# of before September 2025 do not name them.
_GROUPS = {160: (8, 3), 256: (8, 4)}


def latent_heads(settings: Settings, num_heads: int) -> dict[str, Any]:
    """Return the entries of the heads; `head_dim` is what RoPE rotates of one, as in `config.json`.

    Raises `ValueError` for sizes that belong to neither form.
    """
    rank, rope_dim = settings.size("attention.kv_lora_rank"), settings.size("rope.dimension_count")
    keys, values = (settings.size(f"attention.{name}_length") for name in ("key", "value"))
    kv_heads = settings.size("attention.head_count_kv", num_heads)
    found, wanted = (kv_heads, keys, values), (num_heads, keys, values)
    if "attention.key_length_mla" in settings.left:
        wanted = (1, rank + rope_dim, rank)
        keys, values = (settings.size(f"attention.{name}_length_mla") for name in ("key", "value"))
    require(
        found == wanted,
        f"{settings.file.path}: head_count_kv, key_length and value_length of latent attention "
        f"with kv_lora_rank={rank} and rope.dimension_count={rope_dim} must be {wanted}, not "
        f"{found}",
    )
    entry = settings.entry("rope.dimension_count", rope_dim)
    require(rope_dim < keys, f"{entry} must be below {keys}, the size of a head")
    return {
        "num_key_value_heads": num_heads,
        "head_dim": rope_dim,
        "kv_lora_rank": rank,
        "q_lora_rank": settings.take("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys - rope_dim,
        "v_head_dim": values,
    }


def latent_rope(settings: Settings, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of RoPE, with YaRN's factor of whole queries and keys.

    A file has 0.1 x mscale_all_dim. In all published models, mscale is equal to it.
    """
    if "rope_scaling" not in rope:
        settings.take("rope.scaling.yarn_log_multiplier")  # has no effect in llama.cpp either
        return rope
    if not settings.left.get("rope.scaling.yarn_log_multiplier"):
        return rope
    scale = 10 * settings.positive("rope.scaling.yarn_log_multiplier")
    mscales = {"mscale": scale, "mscale_all_dim": scale}
    return rope | {"rope_scaling": rope["rope_scaling"] | mscales}


def routed_experts(settings: Settings, num_layers: int) -> dict[str, Any]:
    """Return the entries of the experts, with the architecture that their router belongs to.

    Files of DeepSeek-V2 may be without expert_gating_func; those of V3 have a bias for each expert.
    """
    path, count = settings.file.path, settings.size("expert_count")
    has_bias = f"blk.{num_layers - 1}.exp_probs_b.bias" in settings.file.tensors
    gate = settings.take("expert_gating_func") or (_SIGMOID if has_bias else _SOFTMAX)
    check_choice(f"{path}: deepseek2.expert_gating_func", gate, (_SOFTMAX, _SIGMOID))
    groups, used = _GROUPS.get(count, (1, 1))
    groups = settings.take("expert_group_count") or groups
    used = settings.take("expert_group_used_count") or used
    method = "noaux_tc" if gate == _SIGMOID else "greedy" if groups == 1 else "group_limited_greedy"
    return {
        "architectures": [f"DeepseekV{3 if gate == _SIGMOID else 2}ForCausalLM"],
        "intermediate_size": settings.size("feed_forward_length"),
        "first_k_dense_replace": settings.take("leading_dense_block_count", 0),
        "n_routed_experts": count,
        "num_experts_per_tok": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size("expert_feed_forward_length"),
        "n_shared_experts": settings.take("expert_shared_count", 0) or None,
        "topk_method": method,
        "n_group": groups,
        "topk_group": used,
        "norm_topk_prob": settings.take("expert_weights_norm", False),
        "routed_scaling_factor": settings.take("expert_weights_scale") or 1.0,
    }
