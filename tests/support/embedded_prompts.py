"""Prompts with embeddings, and what transformers generates from them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve import LLM, SamplingParams

Prompt = dict[str, Any]


def greedy(max_tokens: int = 10, **others: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **others}
    )


def random_rows(reference: nn.Module, num_rows: int, seed: int = 0) -> Tensor:
    """Return float32 vectors [num_rows, hidden_size] as large as the model's token embeddings."""
    generator = torch.Generator().manual_seed(seed)
    table = embeddings_of(reference, list(range(64)))
    noise = torch.randn(num_rows, table.shape[1], generator=generator)
    return noise * table.std() + table.mean()


@torch.no_grad()
def embeddings_of(reference: nn.Module, token_ids: list[int]) -> Tensor:
    """Return the `inputs_embeds` that stand for token ids, [num_tokens, hidden_size]."""
    return reference.get_input_embeddings()(torch.tensor([token_ids]))[0].float()


def filled(reference: nn.Module, prompt: Prompt) -> Tensor:
    """Return `inputs_embeds` [num_tokens, hidden_size] of a prompt with embeddings."""
    if "prompt_embeds" in prompt:
        return prompt["prompt_embeds"]
    whole = embeddings_of(reference, prompt["prompt_token_ids"]).clone()
    for start, rows in prompt.get("prompt_embeds_pieces", ()):
        whole[start : start + len(rows)] = rows
    return whole


@torch.no_grad()
def expected_tokens(reference: Any, prompt: Prompt, max_tokens: int = 10) -> list[int]:
    """Return what transformers generates; with embeddings it returns new tokens only."""
    found = reference.generate(
        inputs_embeds=filled(reference, prompt)[None],
        attention_mask=torch.ones(1, len(filled(reference, prompt)), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    return found[0].tolist()


def tokens_of(llm: LLM, prompts: list[Prompt], params: Any = None) -> list[list[int]]:
    outputs = llm.generate(prompts, params or greedy(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def mixed_prompts(reference: nn.Module, seed: int = 0) -> list[Prompt]:
    """Return prompts of embeddings only, with pieces in several places, and of token ids."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 64, 60).tolist()

    def rows(count: int) -> Tensor:
        return random_rows(reference, count, int(rng.integers(2**31)))

    return [
        {"prompt_embeds": rows(1)},
        {"prompt_embeds": rows(16)},
        {"prompt_embeds": rows(41)},
        {"prompt_token_ids": ids[:23], "prompt_embeds_pieces": [(3, rows(9))]},
        {"prompt_token_ids": ids[:33], "prompt_embeds_pieces": [(30, rows(3)), (0, rows(2))]},
        {"prompt_token_ids": ids, "prompt_embeds_pieces": [(7, rows(17)), (24, rows(1))]},
        {"prompt_token_ids": ids[:20]},
    ]
