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
from tiny_checkpoints import GEMMA2, GEMMA3, GPT_OSS, edit_json, make_checkpoint
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

pytestmark = pytest.mark.small(written=["qwen3"])  # of Gemma, test_gemma.py changes every entry
WINDOWED = {"sliding_window": 9}
MODELS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "gemma2": (Gemma2ForCausalLM, GEMMA2),
    "gemma3": (Gemma3ForCausalLM, GEMMA3),
    "gpt-oss": (GptOssForCausalLM, GPT_OSS | {"num_hidden_layers": 2}),
    "llama": (LlamaForCausalLM, {}),
    "minicpm": (MiniCPMForCausalLM, MINICPM4),
    "mistral": (MistralForCausalLM, WINDOWED),
    "phi3": (Phi3ForCausalLM, WINDOWED),
    "qwen2": (Qwen2ForCausalLM, WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": (Qwen3ForCausalLM, WINDOWED | {"use_sliding_window": True, "max_window_layers": 1}),
}
LOCAL = ["sliding_attention", "full_attention"]
ROPES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
]
# Where a value of the same type would not do.
VALUES: dict[str, list[Any]] = {
    "attention_bias": [True, False],
    "attn_logit_softcapping": [1.0, None],
    "dtype": ["bfloat16", "float16", "float64"],
    "final_logit_softcapping": [2.0, None],
    "head_dim": [8, 12, None],
    "hidden_act": ["gelu_pytorch_tanh", "gelu", "relu"],
    "hidden_activation": ["silu", "gelu"],
    "hidden_size": [32, 60],
    "intermediate_size": [96],
    "layer_types": [LOCAL, LOCAL[::-1], ["full_attention"] * 2, None],
    "max_position_embeddings": [64, 4096],
    "max_window_layers": [0, 2],
    "mlp_bias": [True],
    "num_attention_heads": [2, 8],
    "num_experts_per_tok": [1, 4],
    "num_hidden_layers": [1, 3],
    "num_key_value_heads": [1, 4, None],
    "num_local_experts": [3, 8],
    "original_max_position_embeddings": [256],
    "query_pre_attn_scalar": [64],
    "rms_norm_eps": [1e-2],
    "rope_parameters": ROPES,
    "scale_depth": [1.0, 3.0],
    "scale_emb": [1.0],
    "dim_model_base": [48],
    "sliding_window": [1, 30, 4096, None],
    "sliding_window_pattern": [1, 3],
    "sparse_config": [{"kernel_size": 32}],
    "swiglu_alpha": [1.0, 1.702],
    "swiglu_limit": [0.2, 7.0],
    "tie_word_embeddings": [True],
    "use_bidirectional_attention": [True],
    "use_sliding_window": [False, True],
    "vocab_size": [301],
}
# What transformers reads in training, in generation, or not at all: any other value, same logits.
WITHOUT_EFFECT: dict[str, Any] = {
    "attention_dropout": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5, "pretraining_tp": 2,
    "initializer_range": 0.5, "use_cache": False, "bos_token_id": 7, "eos_token_id": [3, 5],
    "pad_token_id": 9, "output_router_logits": True, "router_aux_loss_coef": 0.5,
    "_sliding_window_pattern": 5,  # Gemma 3 saves what layer_types were made of
    "transformers_version": "4.30.0",
    "model_type": ...,
    "architectures": ...,
}  # fmt: skip


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
