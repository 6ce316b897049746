"""Every entry of config.json, changed and left out one at a time: as in transformers, or refused.

The entries are those that transformers writes, so a field that a new version adds fails here until
somebody has looked at it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from minicpm_reference import MINICPM4, MiniCPMForCausalLM
from same_or_refused import TOKEN_IDS, check
from tiny_checkpoints import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DELTA,
    DELTA_MOE,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    GRANITE,
    SMOLLM3,
    edit_json,
    make_checkpoint,
)
from transformers import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3NextForCausalLM,
    SmolLM3ForCausalLM,
)

pytestmark = pytest.mark.small(written=["qwen3"])  # of Gemma, test_gemma.py changes every entry
WINDOWED = {"sliding_window": 9}
ALL = {"num_experts": 2}  # for each token, so that rounding to 16 bits does not choose them
MODELS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "deepseek-v2": (DeepseekV2ForCausalLM, DEEPSEEK_V2),
    "deepseek-v3": (DeepseekV3ForCausalLM, DEEPSEEK_V3),
    "gemma2": (Gemma2ForCausalLM, GEMMA2),
    "gemma3": (Gemma3ForCausalLM, GEMMA3),
    "glm4": (Glm4ForCausalLM, {}),
    "gpt-oss": (GptOssForCausalLM, GPT_OSS | {"num_hidden_layers": 2}),
    "granite": (GraniteForCausalLM, GRANITE),
    "llama": (LlamaForCausalLM, {}),
    "minicpm": (MiniCPMForCausalLM, MINICPM4),
    "mistral": (MistralForCausalLM, WINDOWED),
    "olmo2": (Olmo2ForCausalLM, {}),
    "phi3": (Phi3ForCausalLM, WINDOWED),
    "qwen2": (Qwen2ForCausalLM, WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": (Qwen3ForCausalLM, WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3-next": (Qwen3NextForCausalLM, DELTA_MOE | ALL),
    "qwen3.5": (Qwen3_5ForCausalLM, DELTA),
    "qwen3.5-moe": (Qwen3_5MoeForCausalLM, DELTA_MOE | ALL),
    "smollm3": (SmolLM3ForCausalLM, SMOLLM3 | WINDOWED | {"use_sliding_window": True}),
}
LOCAL = ["sliding_attention", "full_attention"]
LINEAR = ["linear_attention", "full_attention"]
ROPES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.25},
]
# Where a value of the same type would not do.
VALUES: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "attention_multiplier": [0.3],
    "attn_logit_softcapping": [1.0, None],
    "dtype": ["bfloat16", "float16", "float64"],
    "embedding_multiplier": [2.0],
    "final_logit_softcapping": [2.0, None],
    "first_k_dense_replace": [0, 5],
    "head_dim": [8, 12, None],
    "hidden_act": ["gelu_pytorch_tanh", "gelu", "relu"],
    "hidden_activation": ["silu", "gelu"],
    "hidden_size": [32, 60],
    "intermediate_size": [96],
    "kv_lora_rank": [16],
    "layer_types": [
        LOCAL,
        LOCAL[::-1],
        ["full_attention"] * 2,
        LINEAR * 2,
        ["linear_attention"] * 4,
        None,
    ],
    "linear_conv_kernel_dim": [2, 5],
    "linear_key_head_dim": [12],
    "linear_num_key_heads": [1, 4],
    "linear_num_value_heads": [2, 6],
    "linear_value_head_dim": [20],
    "moe_intermediate_size": [20, 32],
    "shared_expert_intermediate_size": [24],
    "num_experts": [4],
    "n_group": [2, 8, 3, None],
    "n_routed_experts": [4, 12],
    "n_shared_experts": [1, 3, 0],
    "norm_topk_prob": [False, True],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[0]],
    "logits_scaling": [3],
    "max_position_embeddings": [64, 4096],
    "max_window_layers": [0, 2],
    "mlp_bias": [True],
    "no_rope_layer_interval": [1, 3],
    "no_rope_layers": [[1, 0, 0], [0, 0, 0, 1], None],
    "num_attention_heads": [2, 8],
    "num_experts_per_tok": [1, 3, 4, 7],
    "num_hidden_layers": [1, 3],
    "num_key_value_heads": [1, 4, None],
    "num_local_experts": [3, 8],
    "original_max_position_embeddings": [256],
    "q_lora_rank": [None, 12],
    "qk_nope_head_dim": [6],
    "qk_rope_head_dim": [4, 7],
    "query_pre_attn_scalar": [64],
    "residual_multiplier": [0.5],
    "rms_norm_eps": [1e-2],
    "rope_interleave": [False, True],
    "rope_parameters": ROPES,
    "routed_scaling_factor": [0.5, 2],
    "scale_depth": [1.0, 3.0],
    "scale_emb": [1.0],
    "dim_model_base": [48],
    "sliding_window": [1, 30, 4096, None],
    "sliding_window_pattern": [1, 3],
    "sparse_config": [{"kernel_size": 32}],
    "swiglu_alpha": [1.0, 1.702],
    "swiglu_limit": [0.2, 7.0],
    "tie_word_embeddings": [True],
    "topk_group": [1, 3, 5],
    "topk_method": ["group_limited_greedy", "noaux_tc"],
    "use_bidirectional_attention": [True],
    "use_sliding_window": [False, True],
    "v_head_dim": [16],
    "vocab_size": [301],
}
# What transformers reads in training, in generation, or not at all: any other value, same logits.
WITHOUT_EFFECT: dict[str, Any] = {
    "attention_dropout": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5, "pretraining_tp": 2,
    "initializer_range": 0.5, "use_cache": False, "bos_token_id": 7, "eos_token_id": [3, 5],
    "pad_token_id": 9,
    "num_nextn_predict_layers": 2, "output_router_logits": True,
    "qk_head_dim": 99,  # transformers adds it up
    "_sliding_window_pattern": 5,  # Gemma 3 saves what layer_types were made of
    "transformers_version": "4.30.0",
    "router_aux_loss_coef": 0.5,
    "model_type": ...,
    "architectures": ...,
}  # fmt: skip
# Groups of unequal sizes or too few experts, and settings that contradict others.
DEEPSEEK_REFUSES = (
    "n_group", "n_shared_experts", "norm_topk_prob", "num_attention_heads", "num_experts_per_tok",
    "topk_group",
)  # fmt: skip


def entries(path: Path) -> list[str]:
    return sorted(json.loads((path / "config.json").read_text()))


@pytest.fixture(scope="module", params=MODELS)
def written(request, tmp_path_factory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp(request.param)
    architecture, settings = MODELS[request.param]
    model = make_checkpoint(architecture, path, **settings)
    assert check(model, path) == "same"
    return request.param, path


def test_every_entry_changed_is_as_in_transformers_or_refused(
    written: tuple[str, Path], tmp_path: Path, full_size: bool
) -> None:
    name, path = written
    architecture, settings = MODELS[name]
    refused = []
    for entry in entries(path):
        if entry in WITHOUT_EFFECT:
            continue
        assert entry in VALUES, f"{entry} is new: what does it do?"
        for value in VALUES[entry] if full_size else VALUES[entry][:2]:
            try:
                changed = make_checkpoint(architecture, tmp_path, **(settings | {entry: value}))
                expected = changed(torch.tensor([TOKEN_IDS])).logits
            except Exception:  # transformers has no such model either
                continue
            assert expected.isfinite().all()
            if check(changed, tmp_path) == "refused":
                refused.append((entry, value))
    print(name, "refuses", refused)
    assert {entry for entry, _ in refused} <= {
        "dtype",
        "hidden_act",
        "rope_parameters",
        "sparse_config",
        "layer_types",
        "hidden_activation",
        "use_bidirectional_attention",
        *(("mlp_bias",) if name == "minicpm" else ()),  # its checkpoints have none
        *(("head_dim",) if "linear_key_head_dim" in settings else ()),  # three are no pairs
        *(DEEPSEEK_REFUSES if name.startswith("deepseek") else ()),
    }


def test_entries_without_effect_have_none(written: tuple[str, Path], tmp_path: Path) -> None:
    name, path = written
    model = MODELS[name][0].from_pretrained(path).eval()
    for entry, value in WITHOUT_EFFECT.items():
        if value is not ...:
            shutil.copytree(path, tmp_path, dirs_exist_ok=True)
            edit_json(tmp_path / "config.json", **{entry: value})
            assert check(model, tmp_path) == "same", entry


def test_every_entry_left_out_is_as_in_transformers_or_refused(
    written: tuple[str, Path], tmp_path: Path
) -> None:
    name, path = written
    outcomes = {}
    for entry in entries(path):
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        edit_json(tmp_path / "config.json", **{entry: ...})
        try:
            model = MODELS[name][0].from_pretrained(tmp_path, dtype=torch.float32).eval()
            model(torch.tensor([TOKEN_IDS]))
        except Exception:
            continue
        outcomes[entry] = check(model, tmp_path)
    print(name, outcomes)
    assert "same" in outcomes.values()
