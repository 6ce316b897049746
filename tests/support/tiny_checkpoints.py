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
# Three layers with linear attention, one with full attention.
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
DELTA_MOE = DELTA | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
SMOLLM3 = {
    "num_hidden_layers": 3,
    "no_rope_layer_interval": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,  # so that positions are to be seen in all logits
    },
}
# Scales as in the published models, but for the first: a head has 16 values here.
GRANITE = {
    "attention_multiplier": 0.15,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
# Beside TINY_QWEN3, as its smaller published model: queries without LoRA, experts in groups.
DEEPSEEK_V2 = {
    "head_dim": 8,  # what transformers writes: of the rotated part
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
    },
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {"q_lora_rank": 28, "n_group": 4, "topk_group": 2}
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
            elif name.endswith("A_log"):  # some heads of recurrent layers forget slowly
                torch.nn.init.uniform_(parameter, -5.0, 1.0)
            else:
                # A router's more than others: where experts nearly tie, rounding would choose.
                # So are the few of a convolution.
                is_router = name.endswith((".gate.weight", ".router.weight"))
                std = 0.4 if is_router else 0.6 if "conv1d" in name else 0.2
                torch.nn.init.normal_(parameter, std=std)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                torch.nn.init.normal_(buffer, std=0.2)
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
    layers = list(model.model.layers)
    specs = [getattr(getattr(each, "linear_attn", None), "state_spec", None) for each in layers]
    attention = layers[specs.index(None)].self_attn.layer
    of_layer = attention.num_kv_heads, attention.head_dim, model.model.dtype
    num_stored = 2 if attention.value_dim is None else 1
    spec = KVCacheSpec(block_size, *of_layer, num_stored=num_stored)
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
        row_slots=torch.zeros(1, dtype=torch.int32),
    )
    kv_caches = spec.allocate(len(layers), num_blocks + 1)
    kv_caches = [
        kv_cache if state is None else state.allocate(num_slots=2)
        for kv_cache, state in zip(kv_caches, specs, strict=True)
    ]
    hidden = model(torch.tensor(token_ids, dtype=torch.int32), kv_caches, metadata)
    return model.compute_logits(hidden)
