"""Tiny models that pool, and what transformers computes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

TYPES = ("LAST", "CLS", "MEAN", "ALL")
LENGTHS = (1, 2, 5, 16, 17, 33, 40)  # below, at and above the limits of blocks and chunks


def make_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    """Return prompts of token ids; every other one begins as the longest does."""
    rng = np.random.default_rng(seed)
    longest = rng.integers(0, 300, max(lengths)).tolist()
    return [
        longest[:n] if i % 2 else rng.integers(0, 300, n).tolist() for i, n in enumerate(lengths)
    ]


@torch.no_grad()
def hidden_states(model: nn.Module, prompt: list[int]) -> np.ndarray:
    """Return transformers' hidden states after the last norm, [num_tokens, hidden_size]."""
    decoder = getattr(model, "model", model)
    return decoder(torch.tensor([prompt])).last_hidden_state[0].float().numpy()


def pooled(hidden: np.ndarray, kind: str) -> np.ndarray:
    if kind == "MEAN":
        return hidden.mean(0)
    return {"LAST": hidden[-1], "CLS": hidden[0], "ALL": hidden}[kind]


def normalized(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def write_modules(folder: Path, mode: str | None, *, normalizes: bool, **others: Any) -> None:
    """Write the files of sentence-transformers; `mode` is such as "lasttoken" or "mean_tokens"."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [{"idx": i, "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    if mode is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        every = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        file = {f"pooling_mode_{name}": name == mode for name in every} | others
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(file))
