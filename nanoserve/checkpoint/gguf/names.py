"""Map tensor names from GGUF to safetensors checkpoints, for each architecture.

llama.cpp's converter (convert_hf_to_gguf.py) also changes some values of the architectures marked
in `FORMS`; `nanoserve.checkpoint.gguf.source` reverses this.
"""

import re
from typing import NamedTuple

_PLAIN = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_GEMMA = _PLAIN | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_OLMO2 = {name: theirs for name, theirs in _PLAIN.items() if name not in ("attn_norm", "ffn_norm")}
_OLMO2 |= {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = _PLAIN | {
    "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip
# A tensor of all experts in GGUF is one tensor per expert here.
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
ONE_ROW = ".shared_expert_gate.weight"  # a matrix with one row, which GGUF stores as a vector
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}  # fmt: skip
_GPT_OSS = _PLAIN | _QWEN_EXPERTS | {
    "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
}  # fmt: skip
_DEEPSEEK = _PLAIN | _QWEN_EXPERTS | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
_QWEN_NEXT = {name: theirs for name, theirs in _PLAIN.items() if name != "ffn_norm"}
_QWEN_NEXT |= _QWEN_EXPERTS | _SHARED_EXPERT | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
_WHOLE = {  # names without ".weight" or ".bias" in checkpoints
    "attn_sinks": "self_attn.sinks", "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias",
}  # fmt: skip
_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# These are settings, not weights: `nanoserve.checkpoint.gguf.rope` reads them.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(weight|bias))?")
_NEXTN = re.compile(r"blk\.(\d+)\.(.+)")


class Form(NamedTuple):
    """The form in which GGUF files store an architecture."""

    architecture: str  # name in `config.json`
    names: dict[str, str] = _PLAIN  # names of a layer's tensors
    # Rows of q and k are permuted so that RoPE rotates adjacent pairs; in safetensors checkpoints,
    # a pair has one element in each half of a head.
    has_permuted_heads: bool = False
    adds_one_to_norms: bool = False  # the stored weight is Gemma's 1 + w
    rotates_parts: bool = False  # rope.dimension_count may be less than a head
    has_linear_attention: bool = False  # see `nanoserve.checkpoint.gguf.linear_heads`
    # Beginning of the names of tensors for multi-token prediction, in layers behind the others,
    # which the model does not read. None: files may not have such layers.
    nextn: str | None = None


_QWEN35_MOE = Form(
    "Qwen3_5MoeForCausalLM",
    _QWEN_NEXT,
    adds_one_to_norms=True,
    rotates_parts=True,
    has_linear_attention=True,
    nextn="mtp.{}.",
)
FORMS = {
    "llama": Form("LlamaForCausalLM", _PLAIN | _MIXTRAL_EXPERTS, has_permuted_heads=True),
    "qwen2": Form("Qwen2ForCausalLM"),
    "qwen2moe": Form("Qwen2MoeForCausalLM", _PLAIN | _QWEN_EXPERTS | _SHARED_EXPERT),
    "qwen3": Form("Qwen3ForCausalLM"),
    "qwen3moe": Form("Qwen3MoeForCausalLM", _PLAIN | _QWEN_EXPERTS),
    "gemma2": Form("Gemma2ForCausalLM", _GEMMA, adds_one_to_norms=True),
    "gemma3": Form("Gemma3ForCausalLM", _GEMMA, adds_one_to_norms=True),
    "phi3": Form(
        "Phi3ForCausalLM",
        _PLAIN | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    ),
    "gpt-oss": Form("GptOssForCausalLM", _GPT_OSS),
    "minicpm": Form("MiniCPMForCausalLM", has_permuted_heads=True),
    "glm4": Form("Glm4ForCausalLM", _GLM4, rotates_parts=True),
    "granite": Form("GraniteForCausalLM", has_permuted_heads=True),
    "olmo2": Form("Olmo2ForCausalLM", _OLMO2),
    "smollm3": Form("SmolLM3ForCausalLM", has_permuted_heads=True),
    "deepseek2": Form("DeepseekV3ForCausalLM", _DEEPSEEK, nextn="model.layers.{}."),  # or V2
    # Qwen3-Next's files have the tensors of Qwen3.5, and are computed by its class.
    "qwen3next": _QWEN35_MOE,
    "qwen35": _QWEN35_MOE._replace(architecture="Qwen3_5ForCausalLM"),
    "qwen35moe": _QWEN35_MOE,
}


def plain_name(form: Form, name: str, num_layers: int) -> str | None:
    """Return the name in a checkpoint, with {} for the expert's index; None if unknown.

    num_layers: without those for multi-token prediction.
    """
    match = _NEXTN.fullmatch(name)
    if form.nextn is not None and match is not None and int(match[1]) >= num_layers:
        return form.nextn.format(int(match[1])) + match[2]
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        if part in _WHOLE:
            return f"model.layers.{int(layer)}.{_WHOLE[part]}"
        theirs = None if kind is None else form.names.get(part)
        return None if theirs is None else f"model.layers.{int(layer)}.{theirs}.{kind}"
    part, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[part]}.{kind}" if part in _OUTSIDE and kind == "weight" else None
