"""Checkpoints that store several linears as one tensor fill the same parameters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint
from torch import nn
from transformers import LlamaForCausalLM as ReferenceLlama

from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel
from nanoserve.models.llama import LlamaForCausalLM

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class FusedLlama(LlamaForCausalLM):
    """Llama as Phi-3 stores it."""

    fused_tensors = FUSED


def fuse(path: Path) -> None:
    """Concatenate in model.safetensors what `FUSED` names."""
    tensors = load_file(path / "model.safetensors")
    for whole, parts in FUSED.items():
        first = parts[0]
        for name in [name for name in tensors if f".{first}." in name]:
            rows = [tensors.pop(name.replace(first, part)) for part in parts]
            tensors[name.replace(first, whole)] = torch.cat(rows)
    save_file(tensors, path / "model.safetensors")


def load(architecture: type[nn.Module], path: Path, tp: TensorParallel) -> nn.Module:
    context = LayerContext(parallel=ParallelContext(tp))
    model = architecture(ModelConfig.from_checkpoint(path), context)
    load_weights(model, path)
    return model


@pytest.fixture(params=[False, True], ids=["plain", "biases"])
def checkpoints(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """The same weights, apart and fused."""
    for folder in ("apart", "fused"):
        settings = {"attention_bias": request.param, "mlp_bias": request.param}
        make_checkpoint(ReferenceLlama, tmp_path / folder, **settings)
    fuse(tmp_path / "fused")
    return tmp_path / "apart", tmp_path / "fused"


@pytest.mark.parametrize(
    "tp",
    # With four ranks, two of them share each of the two KV heads.
    [TensorParallel(), *(TensorParallel(rank, 2) for rank in range(2)), TensorParallel(2, 4)],
    ids=lambda tp: f"rank {tp.rank} of {tp.size}",
)
def test_a_fused_checkpoint_fills_the_same_parameters(
    checkpoints: tuple[Path, Path], tp: TensorParallel
) -> None:
    apart, fused = checkpoints
    expected = dict(load(LlamaForCausalLM, apart, tp).named_parameters())
    loaded = dict(load(FusedLlama, fused, tp).named_parameters())
    assert loaded.keys() == expected.keys()
    for name in expected:
        assert torch.equal(loaded[name], expected[name]), name


def test_parts_are_not_taken_for_the_whole(checkpoints: tuple[Path, Path]) -> None:
    apart, fused = checkpoints
    with pytest.raises(ValueError, match=r"missing: .*qkv_proj.*unexpected: .*q_proj"):
        load(FusedLlama, apart, TensorParallel())
    with pytest.raises(ValueError, match=r"missing: .*q_proj.*unexpected: .*qkv_proj"):
        load(LlamaForCausalLM, fused, TensorParallel())


@pytest.mark.parametrize("num_rows", [127, 129, 64])
def test_a_whole_with_too_few_or_too_many_rows_is_refused(
    checkpoints: tuple[Path, Path], num_rows: int
) -> None:
    """64 + 32 + 32 rows of q, k and v; the first two would fit into 129 as well."""
    _, fused = checkpoints
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors = load_file(fused / "model.safetensors") | {name: torch.zeros(num_rows, 48)}
    save_file(tensors, fused / "model.safetensors")
    told = rf"misshapen: {name} is \[{num_rows}, 48\], not \[128, 48\]"
    with pytest.raises(ValueError, match=told):
        load(FusedLlama, fused, TensorParallel(1, 2))
