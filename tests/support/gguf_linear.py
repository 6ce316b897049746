"""What llama.cpp's converter makes of Qwen3-Next and Qwen3.5, beside `gguf_models`."""

from typing import Any

import torch

ARCHS = ("qwen3next", "qwen35", "qwen35moe")


def settings(config: Any, arch: str) -> dict[str, Any]:
    """The settings beside the usual ones; the converter leaves the number of layers in MTP out."""
    share = config.rope_parameters["partial_rotary_factor"]
    found = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": 4,
        "rope.dimension_count": int(config.head_dim * share),
    }
    if arch != "qwen3next":
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    if arch != "qwen35":
        found |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return found


def tensors(config: Any, arch: str, name: str, weight: torch.Tensor) -> dict[str, Any]:
    """A parameter of `linear_attn`, as (values, order of rows or None, order of columns or None).

    By the names in a file, without the layer. The values of an order are taken from `weight`.
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    part = name.partition("linear_attn.")[2]
    of_keys = 2 * keys * key_dim
    if part == "in_proj_qkvz.weight":  # of Qwen3-Next: by key heads
        group = values // keys * value_dim
        rows = torch.arange(len(weight)).view(keys, -1)
        cuts = rows.split((key_dim, key_dim, group, group), dim=1)
        q, k, v, z = (cut.flatten() for cut in cuts)
        return {"attn_qkv.weight": (torch.cat((q, k, v)), None), "attn_gate.weight": (z, None)}
    theirs = {
        "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight",
        "in_proj_ba.weight": "ssm_ba.weight", "in_proj_b.weight": "ssm_beta.weight",
        "in_proj_a.weight": "ssm_alpha.weight", "out_proj.weight": "ssm_out.weight",
        "conv1d.weight": "ssm_conv1d.weight", "dt_bias": "ssm_dt.bias", "A_log": "ssm_a",
        "norm.weight": "ssm_norm.weight",
    }[part]  # fmt: skip
    if arch == "qwen3next" or part == "norm.weight":
        return {theirs: (None, None)}
    size = value_dim if "z" in part or "qkv" in part or "conv" in part or "out" in part else 1
    order = torch.arange(values * size).view(keys, -1, size).transpose(0, 1).flatten()
    if part == "out_proj.weight":
        return {theirs: (None, order)}
    if "qkv" in part or "conv" in part:
        order = torch.cat((torch.arange(of_keys), of_keys + order))
    return {theirs: (order, None)}
