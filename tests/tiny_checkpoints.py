"""Checkpoints that transformers itself writes, small enough to make one per test."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

TINY_QWEN3 = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # 4 x 16 is not hidden_size, as in the real small Qwen3
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
    "dtype": "float32",
}


def make_qwen3(path: Path | str, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """Write a tiny random Qwen3 to `path` and return transformers' own model of it.

    `overrides` are fields of `Qwen3Config`. The weights are larger than a fresh model's: with
    those, all logits nearly tie, and a comparison of tokens would compare rounding errors.
    """
    settings = TINY_QWEN3 | overrides
    dtype = getattr(torch, settings["dtype"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**settings))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).eval()
    model.save_pretrained(path)
    return model
