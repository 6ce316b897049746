"""The factors and soft caps of Gemma and MiniCPM, as `config.json` has them."""

import math

from nanoserve.checkpoint.config_json import ConfigFile


def read_scales(file: ConfigFile) -> dict[str, float | None]:
    """The fields of a `ModelConfig` that the file says something of."""
    scales: dict[str, float | None] = {}
    if file.has("query_pre_attn_scalar"):
        scales["attention_scale"] = file.positive("query_pre_attn_scalar") ** -0.5
    caps = {"attention_soft_cap": "attn_logit_softcapping"}
    caps |= {"logits_soft_cap": "final_logit_softcapping"}
    for ours, theirs in caps.items():
        scales[ours] = None if file.get(theirs) is None else file.positive(theirs)
    if file.get("scale_emb") is not None:  # MiniCPM (Hu et al. 2024, arXiv 2404.06395)
        layers = file.size("num_hidden_layers")
        scales["embedding_scale"] = file.positive("scale_emb")
        scales["residual_scale"] = file.positive("scale_depth") / math.sqrt(layers)
        scales["logits_scale"] = file.positive("dim_model_base") / file.size("hidden_size")
    return scales
