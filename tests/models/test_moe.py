"""What config.json says of mixtures of experts, and their router, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import edit_json, make_checkpoint, prompt_logits
from transformers import (
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.moe_config import MoEConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.experts import SparseMoE
from nanoserve.models.mixtral import MixtralMoE
from nanoserve.models.registry import model_class

PROMPT = [(7 * i * i + i) % 300 for i in range(40)]
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN2 = QWEN | {"head_dim": 12, "shared_expert_intermediate_size": 36}
MIXTRAL = {"num_local_experts": 6}
ARCHITECTURES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "qwen2-moe": (Qwen2MoeForCausalLM, QWEN2),
    "qwen3-moe": (Qwen3MoeForCausalLM, QWEN),
    "mixtral": (MixtralForCausalLM, MIXTRAL),
}


@torch.inference_mode()
def our_logits(path: Path) -> torch.Tensor:
    config = ModelConfig.from_checkpoint(path)
    model = model_class(config.architecture)(config, LayerContext())
    load_weights(model, path)
    return prompt_logits(model, PROMPT)


@torch.inference_mode()
def assert_agrees(model: PreTrainedModel, path: Path) -> torch.Tensor:
    logits, expected = our_logits(path), model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    return logits


# ---------------------------------------------------------------- what transformers may write


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3-moe", {"num_experts": 3}),
        ("qwen3-moe", {"num_experts": 2}),  # all of them for each token
        ("qwen3-moe", {"num_experts_per_tok": 1}),
        ("qwen3-moe", {"num_experts_per_tok": 5}),
        ("qwen3-moe", {"norm_topk_prob": True}),
        ("qwen3-moe", {"moe_intermediate_size": 20}),
        ("qwen3-moe", {"decoder_sparse_step": 2}),
        ("qwen3-moe", {"decoder_sparse_step": 3}),  # both layers are dense
        ("qwen3-moe", {"mlp_only_layers": [0]}),
        ("qwen3-moe", {"mlp_only_layers": [-1, 1, 7]}),
        ("qwen3-moe", {"mlp_only_layers": [0], "intermediate_size": 50}),
        ("qwen3-moe", {"attention_bias": True}),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 9}),
        ("qwen3-moe", {"use_sliding_window": False, "sliding_window": 9}),
        ("qwen3-moe", {"output_router_logits": True}),
        ("qwen2-moe", {"shared_expert_intermediate_size": 20}),
        ("qwen2-moe", {"norm_topk_prob": True}),
        ("qwen2-moe", {"qkv_bias": False}),
        ("qwen2-moe", {"mlp_only_layers": [0], "intermediate_size": 50}),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 9}),
        ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
        ("mixtral", {"num_local_experts": 2}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_experts_per_tok": 6}),
        ("mixtral", {"intermediate_size": 20}),
        ("mixtral", {"sliding_window": 9}),
        ("mixtral", {"router_jitter_noise": 0.5}),  # in training
        ("mixtral", {"head_dim": None}),
    ],
    ids=str,
)
def test_each_setting_has_the_effect_that_it_has_in_transformers(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    architecture, settings = ARCHITECTURES[name]
    assert_agrees(make_checkpoint(architecture, tmp_path, **(settings | change)), tmp_path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_another_activation_is_refused(name: str, tmp_path: Path) -> None:
    architecture, settings = ARCHITECTURES[name]
    make_checkpoint(architecture, tmp_path, **settings, hidden_act="gelu_pytorch_tanh")
    with pytest.raises(ValueError, match=r"gelu_pytorch_tanh.*experts"):
        our_logits(tmp_path)


# ---------------------------------------------------------------- what else may be in a file


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3-moe", {"num_experts": 6, "num_local_experts": ...}),  # as transformers 4 wrote it
        ("qwen3-moe", {"num_experts": 6}),
        ("qwen3-moe", {"num_experts_per_tok": 3}),
        ("qwen3-moe", {"norm_topk_prob": True}),
        ("qwen3-moe", {"norm_topk_prob": ...}),
        ("qwen3-moe", {"decoder_sparse_step": ...}),
        ("qwen3-moe", {"mlp_only_layers": ...}),
        ("qwen3-moe", {"mlp_only_layers": None}),
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 9}),
        ("qwen3-moe", {"max_window_layers": 1, "layer_types": ["full_attention"] * 2}),
        ("qwen2-moe", {"qkv_bias": ..., "norm_topk_prob": ..., "attention_bias": True}),
        ("qwen2-moe", {"layer_types": ..., "use_sliding_window": True, "sliding_window": 9}),
        ("mixtral", {"num_experts": 6, "num_local_experts": ...}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("mixtral", {"num_experts_per_tok": ...}),
        ("mixtral", {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
        ("mixtral", {"moe_intermediate_size": 17, "attention_bias": True}),
        ("mixtral", {"sliding_window": 9}),
        ("mixtral", {"sliding_window": ...}),
    ],
    ids=str,
)
def test_an_edited_file_is_read_as_transformers_reads_it(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    architecture, settings = ARCHITECTURES[name]
    make_checkpoint(architecture, tmp_path, **settings)
    edit_json(tmp_path / "config.json", **change)
    model = architecture.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_agrees(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3-moe", {"num_local_experts": ...}, "experts.100.gate_proj"),  # it implies 128
        ("qwen3-moe", {"num_local_experts": 5}, "unexpected: .*experts.5"),
        ("qwen3-moe", {"num_local_experts": 7}, "missing: .*experts.6"),
        ("qwen3-moe", {"num_local_experts": None}, "num_local_experts"),
        ("qwen3-moe", {"num_local_experts": 0}, "num_local_experts=0"),
        ("qwen3-moe", {"num_experts": 5}, "contradicts itself.*5.*6"),
        ("qwen3-moe", {"num_experts_per_tok": ...}, "num_experts_per_tok=8 exceeds num_experts=6"),
        ("qwen3-moe", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        ("qwen3-moe", {"moe_intermediate_size": 25}, r"gate_proj.weight is \[24, 48\], not \[25,"),
        ("qwen3-moe", {"moe_intermediate_size": ...}, r"not \[768, 48\]"),
        ("qwen3-moe", {"decoder_sparse_step": 2}, "missing: .*layers.0.mlp.gate_proj"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, "missing: .*layers.1.mlp.gate_proj"),
        ("qwen3-moe", {"mlp_only_layers": 1}, "mlp_only_layers=1 must be a list"),
        ("qwen3-moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers=.*must be a list"),
        ("qwen3-moe", {"norm_topk_prob": None}, "norm_topk_prob=None must be True or False"),
        ("qwen3-moe", {"norm_topk_prob": "no"}, "norm_topk_prob='no' must be True or False"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ("qwen2-moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        ("qwen2-moe", {"shared_expert_intermediate_size": ...}, r"not \[5632, 48\]"),
        ("qwen2-moe", {"num_experts": 0}, "num_experts=0"),
        ("mixtral", {"num_local_experts": ...}, "missing: .*experts.6.w3.*and 8 more"),
        ("mixtral", {"num_experts": 5}, "contradicts itself.*5.*6"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds num_experts=6"),
        ("mixtral", {"intermediate_size": 25}, r"w1.weight is \[80, 48\], not \[25, 48\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_weights_is_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    architecture, settings = ARCHITECTURES[name]
    make_checkpoint(architecture, tmp_path, **settings)
    edit_json(tmp_path / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        our_logits(tmp_path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stacks_of_experts_are_read_or_refused_by_name(name: str, tmp_path: Path) -> None:
    """What `save_original_format=False` writes: in Mixtral's, other names differ, too."""
    architecture, settings = ARCHITECTURES[name]
    model = make_checkpoint(architecture, tmp_path, **settings)
    expected = our_logits(tmp_path)
    model.save_pretrained(tmp_path, save_original_format=False)
    if name == "mixtral":
        with pytest.raises(ValueError, match=r"unexpected: .*mlp\.experts\.gate_up_proj"):
            our_logits(tmp_path)
    else:
        assert torch.equal(our_logits(tmp_path), expected)


COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
SMALL = COMMON | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}


def test_the_files_of_published_checkpoints() -> None:
    """Qwen3-30B-A3B and Mixtral-8x7B, written by transformers 4."""
    qwen = COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151_936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40_960,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48,
        "use_sliding_window": False, "router_aux_loss_coef": 0.001, "attention_bias": False,
    }  # fmt: skip
    assert ModelConfig.from_hf(qwen, {}).moe == MoEConfig(128, 8, 768, norm_topk_prob=True)
    mixtral = COMMON | {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 32_000, "hidden_size": 4096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32_768, "num_local_experts": 8, "num_experts_per_tok": 2,
        "output_router_logits": False, "router_aux_loss_coef": 0.02,
    }  # fmt: skip
    assert ModelConfig.from_hf(mixtral, {}).moe == MoEConfig(8, 2, 14_336, norm_topk_prob=True)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Qwen3MoeForCausalLM", MoEConfig(128, 8, 768, norm_topk_prob=False)),
        ("MixtralForCausalLM", MoEConfig(8, 2, 80, norm_topk_prob=True)),
    ],
)
def test_what_a_file_does_not_say_is_implied(architecture: str, expected: MoEConfig) -> None:
    raw = SMALL | {"architectures": [architecture]}
    assert ModelConfig.from_hf(raw, {}).moe == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        (
            {"num_experts_per_tok": 2, "num_local_experts": 4},
            MoEConfig(4, 2, 80, norm_topk_prob=True),
        ),
        (
            {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}
            | {"norm_topk_prob": False, "decoder_sparse_step": 2},
            MoEConfig(4, 2, 24, norm_topk_prob=False, dense_layers=frozenset({0, 2})),
        ),
    ],
)
def test_a_model_of_ones_own_has_experts_if_its_file_says_so(
    settings: dict[str, Any], expected: MoEConfig | None
) -> None:
    raw = SMALL | {"architectures": ["MyForCausalLM"]} | settings
    assert ModelConfig.from_hf(raw, {}).moe == expected


# ---------------------------------------------------------------- the router


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "change"),
    [("qwen3-moe", {}), ("qwen3-moe", {"norm_topk_prob": True}), ("mixtral", {})],
)
@torch.inference_mode()
def test_experts_and_weights_are_those_of_transformers(
    name: str, change: dict[str, Any], dtype: str
) -> None:
    """To the last bit, and the weights in the same dtype."""
    architecture, settings = ARCHITECTURES[name]
    hf_config = architecture.config_class(hidden_size=64, **settings, **change)
    router = (MixtralTopKRouter if name == "mixtral" else Qwen3MoeTopKRouter)(hf_config)
    raw = hf_config.to_dict() | {"architectures": [architecture.__name__]}
    context = LayerContext(getattr(torch, dtype))
    layer_class = MixtralMoE if name == "mixtral" else SparseMoE
    layer = layer_class(ModelConfig.from_hf(raw, {}), 0, context)
    torch.manual_seed(0)
    layer.router.normal_()
    router.weight.copy_(layer.router)
    hidden = torch.randn(50, 64).to(context.dtype)
    ids, weights = layer.route(hidden)
    _, expected_weights, expected_ids = router.to(context.dtype)(hidden)
    assert torch.equal(ids, expected_ids) and weights.dtype == expected_weights.dtype
    assert torch.equal(weights, expected_weights)
