"""Checkpoints that transformers itself writes, small enough to make one per test."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.utils import logging

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCacheSpec

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
# Beside TINY_QWEN3. The window, the caps and both kinds of layers are to be seen in all logits.
GEMMA2 = {
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
# YaRN with whole and with broken indices differs; the gate is clamped; experts are many and few.
GPT_OSS = {
    "num_hidden_layers": 3,
    "sliding_window": 9,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.5,
    "swiglu_alpha": 1.3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
}


def make_qwen3(path: Path | str, seed: int = 0, **overrides: Any) -> Qwen3ForCausalLM:
    """Write a tiny random Qwen3 to `path` and return transformers' own model of it.

    `overrides` are fields of `Qwen3Config`. The weights are larger than a fresh model's: with
    those, all logits nearly tie, and a comparison of tokens would compare rounding errors.
    """
    return make_checkpoint(Qwen3ForCausalLM, path, seed, **overrides)


def make_checkpoint(
    architecture: type[PreTrainedModel], path: Path | str, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """The same for any of transformers' architectures."""
    settings = deepcopy(TINY_QWEN3 | overrides)  # configs write into what they are given
    model = initialise(architecture, settings, seed)
    model.save_pretrained(path)
    return model


def initialise(
    architecture: type[PreTrainedModel], settings: dict[str, Any], seed: int = 0
) -> PreTrainedModel:
    """A random model of transformers; `settings` are all that differ from its defaults."""
    dtype = getattr(torch, settings.get("dtype", "float32"))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = architecture(architecture.config_class(**settings))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            else:
                # A router's more than others: where experts nearly tie, rounding would choose.
                std = 0.4 if name.endswith((".gate.weight", ".router.weight")) else 0.2
                torch.nn.init.normal_(parameter, std=std)
    return model.to(dtype).eval()


def edit_json(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file; `...` as a value removes one."""
    entries = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in entries.items() if v is not ...}))


@torch.inference_mode()
def prompt_logits(model: nn.Module, token_ids: list[int], block_size: int = 16) -> torch.Tensor:
    """Logits [num_tokens, vocab_size] of nanoserve's `model`, or one rank of it, without engine.

    The prompt is one chunk, and its blocks lie in reverse order in the cache.
    """
    num_tokens = len(token_ids)
    num_blocks = -(-num_tokens // block_size)
    attention = next(iter(model.model.layers)).self_attn.layer
    spec = KVCacheSpec(block_size, attention.num_kv_heads, attention.head_dim, model.model.dtype)
    table = torch.arange(num_blocks, 0, -1, dtype=torch.int32)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    ends = torch.tensor([0, num_tokens], dtype=torch.int32)
    metadata = AttentionMetadata(
        positions=positions,
        slot_mapping=table[positions // block_size] * block_size + positions % block_size,
        cu_seqlens_q=ends,
        context_lens=ends[1:],
        block_tables=table.unsqueeze(0),
        num_decode_rows=0,
        max_query_len=num_tokens,
        max_context_len=num_tokens,
    )
    kv_caches = spec.allocate(len(model.model.layers), num_blocks + 1)
    hidden = model(torch.tensor(token_ids, dtype=torch.int32), kv_caches, metadata)
    return model.compute_logits(hidden)
