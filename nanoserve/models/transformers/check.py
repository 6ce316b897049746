"""Compares a model that runs through transformers with transformers' own attention.

The attention interface is an agreement between people: a class may still add a bias of its own,
compute positions by itself, or have layers without attention. So each model computes two short
sequences, once in chunks over a small KV cache, and once as transformers does, right after its
weights are loaded.
"""

from typing import Any

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCacheSpec
from nanoserve.attention.torch import TorchAttention
from nanoserve.models.transformers.attention import NAME, AttentionStep

_LENGTHS = (24, 17)
_ENDS = (7, 8, 24)  # of chunks
_BLOCK_SIZE = 4
# Errors of attention are of the size of the logits. In 16 bits, the order of sums alone changes
# them, and sometimes a router's choice of an expert: so the median over tokens counts.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


@torch.inference_mode()
def why_different(runner: Any) -> str | None:
    """Return how the logits of a `TransformersForCausalLM` differ from transformers' own.

    Returns None if they do not. The weights are loaded; this takes the memory of a few tokens.
    """
    device, size = runner.context.device, runner.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(size, (n,), generator=generator).to(device) for n in _LENGTHS]
    try:
        wanted, found = _own_logits(runner.model, rows), _in_chunks(runner, rows)
    except ValueError as problem:
        return str(problem)
    except Exception as problem:  # from transformers' own code, in whatever way it fails
        return f"{type(problem).__name__}: {problem}"
    errors = [
        ((one - other).abs().amax(1) / other.abs().amax(1).clamp(min=1e-9)).float()
        for one, other in zip(found, wanted, strict=True)
    ]
    error = torch.cat(errors).median().item()
    if not error <= _TOLERANCE[runner.context.dtype]:
        return f"its logits differ by {error:.1e} of the largest from those of its own attention"
    return None


def _own_logits(model: Any, rows: list[Tensor]) -> list[Tensor]:
    """Return the logits of `rows` with transformers' own attention.

    Raises `ValueError` if positions are not counted from 0.
    """
    model.set_attn_implementation("eager")
    try:
        logits = [model(row[None], use_cache=False).logits[0] for row in rows]
        positions = torch.arange(len(rows[0]), device=rows[0].device)[None]
        again = model(rows[0][None], position_ids=positions, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(NAME)
    if not torch.equal(again, logits[0]):
        raise ValueError("its positions do not count from 0")
    return logits


def _in_chunks(runner: Any, rows: list[Tensor]) -> list[Tensor]:
    """Return the logits of `rows`, computed in chunks, several sequences in a step.

    Raises `ValueError` for layers without attention, or with another window than configured.
    """
    config, context = runner.config, runner.context
    spec = KVCacheSpec.of_format(
        _BLOCK_SIZE, config.num_key_value_heads, config.head_dim, context.dtype
    )
    blocks_per_row = -(-max(_LENGTHS) // _BLOCK_SIZE)
    num_blocks = 1 + len(rows) * blocks_per_row
    kv_caches = spec.allocate(
        config.num_hidden_layers,
        num_blocks,
        lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=context.device),
    )
    tables = torch.arange(1, num_blocks, dtype=torch.int32).view(len(rows), blocks_per_row)
    logits: list[list[Tensor]] = [[] for _ in rows]
    start = 0
    for end in _ENDS:
        here = [i for i, row in enumerate(rows) if len(row) > start]
        chunks = [rows[i][start:end] for i in here]
        metadata = _metadata(start, [len(chunk) for chunk in chunks], tables[here], context.device)
        step = AttentionStep(TorchAttention(), kv_caches, metadata)
        hidden = runner.run(step, torch.cat(chunks))
        _check_layers(runner, step)
        computed = runner.compute_logits(hidden).split([len(chunk) for chunk in chunks])
        for i, part in zip(here, computed, strict=True):
            logits[i].append(part)
        start = end
    return [torch.cat(parts) for parts in logits]


def _metadata(
    start: int, lengths: list[int], tables: Tensor, device: torch.device
) -> AttentionMetadata:
    """Return the metadata of a step in which each row computes tokens from `start` on."""
    positions = [torch.arange(start, start + n) for n in lengths]
    slots = [
        table[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE
        for table, p in zip(tables, positions, strict=True)
    ]
    return AttentionMetadata(
        positions=torch.cat(positions).to(device, torch.int32),
        slot_mapping=torch.cat(slots).to(device, torch.int32),
        cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        context_lens=torch.tensor([start + n for n in lengths]).to(device, torch.int32),
        block_tables=tables.to(device),
        num_decode_rows=0,
        max_query_len=max(lengths),
        max_context_len=start + max(lengths),
    )


def _check_layers(runner: Any, step: AttentionStep) -> None:
    """Raise `ValueError` unless each layer computed attention, with the window in its config.

    Also for sinks, if the engine's attention backend does not support them.
    """
    layers, called = runner.config.num_hidden_layers, len(step.windows)
    if called != layers:
        raise ValueError(f"{called} of its {layers} layers compute attention")
    backend = runner.context.attention
    if step.has_sinks and not backend.supports_sinks:
        raise ValueError(
            f"its attention has sinks, which {type(backend).__name__} does not support: choose "
            f"attention_backend='torch', 'numba' or 'triton'"
        )
    types = getattr(runner.settings, "layer_types", None)
    window = getattr(runner.settings, "sliding_window", None)
    for index, found in step.windows.items():
        is_sliding = types[index] == "sliding_attention" if types else window is not None
        if found != (window if is_sliding else None):
            raise ValueError(f"layer {index} has a window of {found} instead of {window}")
