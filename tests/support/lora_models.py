"""Adapters that peft makes for tiny models, and what its merged models answer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from nanoserve import LoRARequest

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = ATTENTION + MLP


def make_adapter(
    base: Path, folder: Path, seed: int, targets: Any = ALL, rank: int = 8, **options: Any
) -> nn.Module:
    """Write a random adapter with peft, and return transformers' model with it merged in."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        **{"lora_alpha": 2 * rank, **options},
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:  # so large that answers differ
            parameter.data = torch.randn_like(parameter) * 0.1
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


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
