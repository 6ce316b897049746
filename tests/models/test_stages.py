"""The stages of a model, in one process: each has its part, and together they are the model."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from minicpm_reference import MINICPM4, MiniCPMForCausalLM
from quantized_checkpoints import CASES as QUANTIZED
from quantized_checkpoints import make_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    SMOLLM3,
    make_checkpoint,
    make_qwen3,
    prompt_logits,
)
from torch import Tensor, nn
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4ForCausalLM,
    GraniteForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.checkpoint.quantized_loader import load_deferred
from nanoserve.features.parallel.pipeline_stage import check_stages, share_layers
from nanoserve.models import registry
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.pipeline_parallel import PipelineParallel
from nanoserve.models.registry import model_class, register_model
from nanoserve.worker.load_model import tensors_of_other_stages

LAYERS = {"num_hidden_layers": 3}
TIED = {"tie_word_embeddings": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "untied": (Qwen3ForCausalLM, {}),
    "tied": (Qwen3ForCausalLM, TIED),
    "biases": (Qwen2ForCausalLM, TIED),
    "gemma2": (Gemma2ForCausalLM, GEMMA2),
    "gemma3, with a rope of its own in layers with a window": (Gemma3ForCausalLM, GEMMA3),
    "glm4, a part of each head": (Glm4ForCausalLM, {}),
    "granite": (GraniteForCausalLM, GRANITE),
    "olmo2, q and k normalised": (Olmo2ForCausalLM, {}),
    "smollm3, a layer without rope": (SmolLM3ForCausalLM, SMOLLM3),
    "a shared expert": (Qwen2MoeForCausalLM, MOE | {"shared_expert_intermediate_size": 36}),
    "minicpm, scaled": (MiniCPMForCausalLM, MINICPM4 | TIED),
    "phi3, fused": (Phi3ForCausalLM, {"sliding_window": None}),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 4}),
    "some layers have experts": (Qwen3MoeForCausalLM, MOE | {"decoder_sparse_step": 2}),
}
TOKEN_IDS = [(7 * i * i + i) % 297 for i in range(40)]


class Link:
    """What two ranks are to each other, in one process: what is sent lies here."""

    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()

    def start_broadcast(self, x: Tensor) -> None:
        self._sent.append(x.clone())

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._sent.popleft())

    def wait(self, work: None) -> None:
        """It is there."""


def contexts(config: ModelConfig, num_stages: int) -> Iterator[LayerContext]:
    """Of each stage, the first one first."""
    plain, before = LayerContext(getattr(torch, config.dtype)), None
    for index, layers in enumerate(share_layers(config, num_stages)):
        behind = Link()
        pp = PipelineParallel(index, num_stages, layers, before, behind)
        yield replace(plain, parallel=ParallelContext(pp=pp))
        before = behind


def load_stages(path: Path, num_stages: int, load: Any = load_weights, **options: Any) -> list:
    config, models = ModelConfig.from_checkpoint(path), []
    for context in contexts(config, num_stages):
        model = model_class(config.architecture)(config, context)
        meta = replace(context, device=torch.device("meta"), num_positions=1)
        elsewhere = tensors_of_other_stages(config, meta)
        load(model, path, elsewhere=elsewhere, **options)
        models.append(model)
    return models


def logits_of(stages: list[nn.Module]) -> Tensor:
    *others, last = (prompt_logits(stage, TOKEN_IDS) for stage in stages)
    assert all(logits is None for logits in others)
    return last


def whole(path: Path, load: Any = load_weights) -> nn.Module:
    config = ModelConfig.from_checkpoint(path)
    model = model_class(config.architecture)(config, LayerContext(getattr(torch, config.dtype)))
    load(model, path)
    return model


@pytest.mark.small(case=CASES.keys() - {"granite", "glm4, a part of each head", "a shared expert"})
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_stages_together_are_the_model(case: str, num_stages: int, tmp_path: Path) -> None:
    architecture, overrides = CASES[case]
    make_checkpoint(architecture, tmp_path, **LAYERS | overrides)
    model, stages = whole(tmp_path), load_stages(tmp_path, num_stages)
    assert torch.equal(logits_of(stages), prompt_logits(model, TOKEN_IDS))
    # Nothing is on two stages but a tied embedding, and what is there has the checkpoint's name.
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    twice = ["model.embed_tokens.weight"] if model.tied_tensors else []
    assert sorted(names) == sorted([*(name for name, _ in model.named_parameters()), *twice])


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_stages_of_a_quantized_checkpoint(case: str, tmp_path: Path) -> None:
    make_quantized(tmp_path, *QUANTIZED[case])
    stages = load_stages(tmp_path, 2, load_deferred)
    expected = prompt_logits(whole(tmp_path, load_deferred), TOKEN_IDS)
    assert torch.equal(logits_of(stages), expected)


@pytest.mark.parametrize("load", [load_weights, load_deferred])
def test_random_weights_fill_a_stage(load: Any, tmp_path: Path) -> None:
    make_qwen3(tmp_path, **LAYERS)
    for stage in load_stages(tmp_path, 3, load, load_format="dummy"):
        weights = [p for name, p in stage.named_parameters() if "norm" not in name]
        assert weights and all(0.01 < weight.std() < 0.03 for weight in weights)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("load", [load_weights, load_deferred])
def test_each_stage_checks_its_tensors_and_those_that_nobody_has(
    load: Any, num_stages: int, tmp_path: Path
) -> None:
    make_qwen3(tmp_path, **LAYERS)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {"model.layers.3.mlp.up_proj.weight": tensors[name].clone()}, file)
    config = ModelConfig.from_checkpoint(tmp_path)
    for context in contexts(config, num_stages):
        meta = replace(context, device=torch.device("meta"), num_positions=1)
        model = model_class(config.architecture)(config, context)
        with pytest.raises(
            ValueError, match=r"do not match the model: unexpected: model\.layers\.3"
        ):
            load(model, tmp_path, elsewhere=tensors_of_other_stages(config, meta))
    save_file({other: tensors[other] for other in tensors if other != name}, file)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load_stages(tmp_path, num_stages, load)


def test_a_tied_head_that_is_stored_is_known_to_all_stages(tmp_path: Path) -> None:
    make_qwen3(tmp_path, **LAYERS | TIED)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    expected = logits_of(load_stages(tmp_path, 3))
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, file)
    assert torch.equal(logits_of(load_stages(tmp_path, 3)), expected)
    save_file(tensors | {"lm_head.weight": 2 * head}, file)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load_stages(tmp_path, 3)


class WholeForCausalLM(registry.model_class("LlamaForCausalLM")):
    """A model of one's own that takes no notice of stages."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, replace(context, parallel=ParallelContext(context.tp)))


def test_a_model_that_is_whole_on_each_stage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.MODELS, "_entries", registry.MODELS.entries())
    register_model("WholeForCausalLM", WholeForCausalLM)
    make_qwen3(tmp_path, **LAYERS)
    config = ModelConfig.from_checkpoint(tmp_path)
    check_stages(config, 3)
    own = replace(config, architecture="WholeForCausalLM")
    with pytest.raises(ValueError, match="WholeForCausalLM, which builds all layers on each stage"):
        check_stages(own, 3)
