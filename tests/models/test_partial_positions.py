"""Models without RoPE in some layers, or in a part of each head: edited files, and refusals."""

from pathlib import Path
from typing import Any

import pytest
from same_or_refused import check
from tiny_checkpoints import SMOLLM3, edit_json, make_checkpoint
from transformers import Glm4ForCausalLM, LlamaForCausalLM, PreTrainedModel, SmolLM3ForCausalLM

from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext
from nanoserve.models.layers.partial_rotary import order_of_halves
from nanoserve.models.layers.rotary import RotaryEmbedding
from nanoserve.models.registry import model_class

MODELS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "glm4": (Glm4ForCausalLM, {}),
    "smollm3": (SmolLM3ForCausalLM, SMOLLM3),
}
SHARE = "partial_rotary_factor"


def edited(name: str, path: Path, change: dict[str, Any]) -> type[PreTrainedModel]:
    architecture, settings = MODELS[name]
    make_checkpoint(architecture, path, **settings)
    edit_json(path / "config.json", **change)
    return architecture


@pytest.mark.small(name=["glm4"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("glm4", {"rope_parameters": ..., "rope_theta": 1e3, SHARE: 0.25}),
        ("glm4", {"rope_parameters": ..., "rope_theta": 1e3}),
        ("glm4", {"rope_parameters": ..., SHARE: None}),
        ("glm4", {"rope_parameters": {"rope_type": "default", SHARE: 0.25}, SHARE: 1.0}),
        ("glm4", {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": 3}),
        ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": ...}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 0]}),
        ("smollm3", {"no_rope_layers": ..., "layer_types": ..., "sliding_window": 9}),
        (
            "smollm3",
            {"layer_types": ..., "use_sliding_window": True, "sliding_window": 9},
        ),
    ],
    ids=str,
)
def test_an_edited_file_is_read_as_transformers_reads_it(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    model = edited(name, tmp_path, change).from_pretrained(tmp_path, dtype="float32").eval()
    assert check(model, tmp_path) == "same"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("glm4", {"rope_parameters": ..., SHARE: 0}, "partial_rotary_factor.*0"),
        ("glm4", {"rope_parameters": ..., SHARE: 1.5}, "partial_rotary_factor.*1.5"),
        ("glm4", {"rope_parameters": ..., SHARE: "half"}, "partial_rotary_factor.*half"),
        ("glm4", {"rope_parameters": ..., SHARE: 0.2}, "0.2 of head_dim=16 is 3, which must be"),
        ("glm4", {"rope_parameters": ..., SHARE: 0.01}, "0.01 of head_dim=16 is 0, which must be"),
        ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\].*num_hidden_layers=3"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, r"no_rope_layers=.*must be a list of 0 and 1"),
        ("smollm3", {"no_rope_layers": 3}, "no_rope_layers=3 must be a list"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "interval=0"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": None}, "layer_interval"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 9}, "layer_types"),
    ],
    ids=str,
)
def test_other_values_are_refused_by_name(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    edited(name, tmp_path, change)
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_checkpoint(tmp_path)


def test_a_model_that_rotates_whole_heads_does_not_rotate_parts(tmp_path: Path) -> None:
    make_checkpoint(LlamaForCausalLM, tmp_path)
    edit_json(tmp_path / "config.json", partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
        ModelConfig.from_checkpoint(tmp_path)
    # A class of one's own may have any setting, so its config alone does not say.
    edit_json(tmp_path / "config.json", architectures=["OwnForCausalLM"])
    config = ModelConfig.from_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5.*PartialRotaryEmbedding"):
        RotaryEmbedding(config.rope, config.head_dim, 512, LayerContext())


def test_the_order_of_a_head_has_each_pair_in_two_halves() -> None:
    assert order_of_halves(8, 4) == [0, 2, 4, 5, 1, 3, 6, 7]
    for rotary_dim in (2, 6, 16):
        order = order_of_halves(16, rotary_dim)
        assert sorted(order) == [*range(16)]
        pairs = [*zip(order[:8], order[8:], strict=True)]
        assert pairs[: rotary_dim // 2] == [(i, i + 1) for i in range(0, rotary_dim, 2)]


def test_a_layer_without_rope_does_not_see_positions(tmp_path: Path) -> None:
    make_checkpoint(SmolLM3ForCausalLM, tmp_path, **SMOLLM3)
    config = ModelConfig.from_checkpoint(tmp_path)
    model = model_class(config.architecture)(config, LayerContext())
    load_weights(model, tmp_path)
    rotaries = [layer.self_attn.rotary for layer in model.model.layers]
    assert config.layers_without_rope == {1} and rotaries[0] is rotaries[2]
    assert (rotaries[1].cos == 1).all() and (rotaries[1].sin == 0).all()
