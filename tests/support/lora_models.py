"""LoRA adapters for tiny models, and what a model answers into which one is merged."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nanoserve import LoRARequest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = ATTENTION + MLP


def peft_adapter(
    base: Path, folder: Path, seed: int, targets: Any = ALL, rank: int = 8, **options: Any
) -> nn.Module:
    """Write a random adapter with peft, and return transformers' model with it merged in."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        **{"lora_alpha": 2 * rank, "init_lora_weights": False, **options},
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # so large that answers differ
            parameter.data = torch.randn_like(parameter) * 0.1
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


def write_adapter(
    model: nn.Module,
    folder: Path,
    seed: int = 0,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    size: float = 0.1,
    **config: Any,
) -> nn.Module:
    """Write a random adapter of some linear layers; return a copy of the model with it merged in.

    config: entries of adapter_config.json, such as `lora_alpha`.
    """
    entries = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, **config}
    rng, merged = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    tensors: dict[str, Tensor] = {}
    for name, layer in merged.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in targets:
            a = torch.randn(rank, layer.in_features, generator=rng) * size
            b = torch.randn(layer.out_features, rank, generator=rng) * size
            tensors |= {f"{name}.lora_A": a, f"{name}.lora_B": b}
            layer.weight.data += entries["lora_alpha"] / rank * b @ a
    write_files(folder, tensors, entries)
    return merged.eval()


def write_files(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write the two files of an adapter; the names of tensors are those without peft's parts."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def request_for(folder: Path, name: str = "adapter", number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, str(folder))


@torch.no_grad()
def greedy(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Return transformers' greedy continuation, computed without a cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def logprobs_of(model: nn.Module, prompt: list[int], tokens: list[int]) -> Tensor:
    """Return transformers' log-probabilities of `tokens` after a prompt."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(tokens)), tokens]
