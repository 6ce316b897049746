"""Convert a GGUF file's settings to the `config.json` of the same model.

`ModelConfig` then reads the entries as usual. A setting that is not read here is rejected with its
name, since it may change the computation in llama.cpp. This module does not import torch.
"""

import math
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.gguf.container import GGUFFile
from nanoserve.checkpoint.gguf.deepseek import latent_heads, latent_rope, routed_experts
from nanoserve.checkpoint.gguf.linear_settings import linear_settings
from nanoserve.checkpoint.gguf.names import Form
from nanoserve.checkpoint.gguf.rope import read_rope
from nanoserve.checkpoint.gguf.settings import Settings, form_of, list_of
from nanoserve.utils.checks import is_int, require, shown

_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip
# End-of-generation tokens that llama.cpp recognises by their text: files name only one as "eos".
_ENDS = {
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "<EOT>", "<|return|>", "<|call|>",
}  # fmt: skip
_END_OF_MESSAGE = "<|end|>"  # in harmony, which has "<|return|>", others follow it
_CONTROL = 3  # in tokenizer.ggml.token_type
# Number of layers of Gemma's largest models, whose attention scale does not follow from the head
# size. No setting has it, and llama.cpp recognises them by this number, too.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}


def read_settings(source: Path | GGUFFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the equivalents of `config.json` and `generation_config.json`."""
    file = GGUFFile.open(source)
    sampling = {
        theirs: file.settings[f"general.sampling.{name}"]
        for name, theirs in _SAMPLING.items()
        if f"general.sampling.{name}" in file.settings
    }
    return config_json(file), sampling


def config_json(file: GGUFFile) -> dict[str, Any]:
    """Return the entries of `config.json`, as transformers writes it.

    A converted Mistral has no sliding window: the converter omits it, and llama.cpp computes
    without it. Raises `ValueError` for settings that are missing or not supported.
    """
    form, settings = form_of(file), Settings(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{file.path} is not a language model: it has no tensor token_embd.weight")
    hidden, heads = settings.size("embedding_length"), settings.size("attention.head_count")
    context = settings.size("context_length")
    num_layers, num_nextn = settings.num_layers(form)
    raw: dict[str, Any] = {
        "architectures": [form.architecture],
        "dtype": _dtype(file, form),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": num_nextn,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "rms_norm_eps": settings.positive("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "eos_token_id": _eos_token_ids(file),
        "quantization_config": {"quant_method": "gguf"},
    }
    is_latent = settings.name == "deepseek2"
    raw |= latent_heads(settings, heads) if is_latent else _heads(settings, hidden // heads, heads)
    rope = read_rope(settings, file, context, raw["head_dim"], form.rotates_parts)
    if is_latent:
        raw |= latent_rope(settings, rope) | routed_experts(settings, num_layers)
    else:
        raw |= rope | _experts(settings)
    if form.has_linear_attention:
        raw |= linear_settings(settings, num_layers)
        settings.left.pop("rope.dimension_sections", None)  # of positions of images
    raw |= _own_settings(settings, raw)
    require(
        not settings.left,
        f"{file.path}: {shown(settings.left)} of {settings.name} is not supported; use the "
        f"model's safetensors checkpoint",
    )
    return raw


def _heads(settings: Settings, usual: int, num_heads: int) -> dict[str, Any]:
    """Return the entries of the heads. usual: size of one in a file that does not say it."""
    head_dim = settings.size("attention.key_length", usual)
    value_dim = settings.size("attention.value_length", head_dim)
    entry = settings.entry("attention.value_length", value_dim)
    require(value_dim == head_dim, f"{entry} must equal key_length={head_dim}")
    num_kv_heads = settings.size("attention.head_count_kv", num_heads)
    return {"num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def _experts(settings: Settings) -> dict[str, Any]:
    """Return the entries of a mixture of experts, or the feed-forward size of a dense model."""
    count = settings.take("expert_count", 0)
    used = settings.take("expert_used_count", 0)
    size = settings.take("expert_feed_forward_length")
    if not count:
        return {"intermediate_size": settings.size("feed_forward_length")}
    return {
        "intermediate_size": settings.size("feed_forward_length", size),
        "moe_intermediate_size": size,
        "num_local_experts": count,
        "num_experts_per_tok": used,
        "norm_topk_prob": settings.name != "qwen2moe",  # as in llama.cpp
    }


def _own_settings(settings: Settings, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that only some architectures have."""
    if settings.name == "minicpm":
        depth = settings.positive("residual_scale") * math.sqrt(raw["num_hidden_layers"])
        base = raw["hidden_size"] / settings.positive("logit_scale")
        embedding = settings.positive("embedding_scale")
        return {"scale_emb": embedding, "scale_depth": depth, "dim_model_base": base}
    if settings.name == "granite":
        return _granite(settings, raw["head_dim"])
    if settings.name in ("qwen2moe", "qwen3next", "qwen35moe"):
        shared = settings.take("expert_shared_feed_forward_length") or raw["intermediate_size"]
        return {"shared_expert_intermediate_size": shared, "qkv_bias": raw["attention_bias"]}
    if settings.name == "phi3":
        return {"sliding_window": settings.take("attention.sliding_window") or None}
    if settings.name == "gpt-oss":  # whose YaRN is not truncated, which no setting says
        rope = raw.get("rope_scaling") or {}
        rope |= {"truncate": False} if rope.get("rope_type") == "yarn" else {}
        window = settings.size("attention.sliding_window")
        return {"rope_scaling": rope or {"rope_type": "default"}, "sliding_window": window}
    if settings.name not in _GEMMA_27B:
        return {}
    is_27b = raw["num_hidden_layers"] == _GEMMA_27B[settings.name]
    scalar = raw["hidden_size"] // raw["num_attention_heads"] if is_27b else raw["head_dim"]
    found = {
        "query_pre_attn_scalar": scalar,
        "sliding_window": settings.size("attention.sliding_window"),
        "sliding_window_pattern": settings.take("attention.sliding_window_pattern"),
        "rope_local_base_freq": settings.take("rope.freq_base_swa"),
        "attn_logit_softcapping": settings.take("attn_logit_softcapping"),
        "final_logit_softcapping": settings.take("final_logit_softcapping"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _granite(settings: Settings, head_dim: int) -> dict[str, Any]:
    """Return Granite's multipliers; in llama.cpp, 0 stands for none."""
    name = "granite.rope.scaling.finetuned"  # llama.cpp uses it as a switch for RoPE
    has_rope = settings.file.settings.get(name, True)
    require(has_rope, f"{settings.file.path}: {name}={shown(has_rope)} is not supported")
    return {
        "embedding_multiplier": settings.take("embedding_scale") or 1.0,
        "residual_multiplier": settings.take("residual_scale") or 1.0,
        "attention_multiplier": settings.take("attention.scale") or head_dim**-0.5,
        "logits_scaling": settings.positive("logit_scale"),
    }


def _dtype(file: GGUFFile, form: Form) -> str:
    """Return the type of the matrices, or bfloat16 for a quantized file.

    A quantized file does not contain the original type, and nearly all of these models were trained
    with bfloat16's range. Gemma's activations overflow float16, whatever type its weights have.
    """
    types = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types <= {"F16", "F32"}:
        half = "bfloat16" if form.architecture.startswith("Gemma") else "float16"
        return half if "F16" in types else "float32"
    return "bfloat16"


def _eos_token_ids(file: GGUFFile) -> list[int]:
    """Return the EOS tokens, as in llama.cpp: by their role in the file, and by their text."""
    found = [file.settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    for token_id in found:
        known = token_id is None or is_int(token_id)
        require(known, f"{file.path}: the EOS token id {shown(token_id)} must be an integer")
    words, types = (list_of(file, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    pairs = enumerate(zip(words, types, strict=False))
    ends = _ENDS - {_END_OF_MESSAGE} if "<|return|>" in words else _ENDS
    spelt = {i for i, (word, kind) in pairs if kind == _CONTROL and word in ends}
    return sorted({token_id for token_id in found if token_id is not None} | spelt)
