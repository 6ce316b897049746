"""Validates the inputs of CPU attention, whose kernel gets addresses without bounds checks."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.kernels.cpu.checks import FLOATS, check_cache, refuse


def check_attention(
    layer: AttentionLayer,
    q: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    metadata: AttentionMetadata,
) -> None:
    """Raise `ValueError` for inputs that the kernel does not support.

    q: [num_tokens, num_heads, head_dim]; cache: [2, blocks, KV heads, block_size, head_dim], or
    [1, ...] if V is a part of K.
    scales: of codes, one for each head of each KV slot; None for floats.
    """
    check_cache(cache, scales, q.dtype)
    num_heads, num_kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    of_q = [*q.shape]
    if of_q[1:] != [num_heads, head_dim] or q.dtype not in FLOATS:
        refuse(f"q must be [tokens, {num_heads}, {head_dim}], float32 or bfloat16", q=q)
    shape, stored = [*cache.shape], 2 if layer.value_dim is None else 1
    of_cache = len(shape) == 5 and [stored, shape[1], num_kv_heads, shape[3], head_dim]
    if shape != of_cache or 0 in shape:
        rule = f"the cache must be [{stored}, blocks, {num_kv_heads}, slots, {head_dim}]"
        refuse(rule, cache=cache)
    if layer.value_dim is not None and not 0 < layer.value_dim <= head_dim:
        raise ValueError(f"value_dim={layer.value_dim} must be from 1 to head_dim={head_dim}")
    if num_heads % num_kv_heads or not num_heads:
        refuse("query heads must be a multiple of KV heads", q=q, cache=cache)
    starts, lens, tables = metadata.cu_seqlens_q, metadata.context_lens, metadata.block_tables
    rows = tables.shape[0] if tables.dim() == 2 else -1
    if starts.shape != (rows + 1,) or lens.shape != (rows,):
        refuse(
            "must be [rows + 1], [rows] and [rows, blocks]",
            cu_seqlens_q=starts,
            context_lens=lens,
            block_tables=tables,
        )
    is_good = starts.dtype == lens.dtype == tables.dtype == torch.int32
    if not (is_good and starts.is_cpu and lens.is_cpu and tables.is_cpu):
        tensors = {"cu_seqlens_q": starts, "context_lens": lens, "block_tables": tables}
        refuse("must be int32, on a CPU", **tensors)
    num_single = metadata.num_decode_rows
    if not 0 <= num_single <= min(rows, of_q[0]):
        raise ValueError(
            f"num_decode_rows={num_single} must be from 0 to {min(rows, of_q[0])}: there are "
            f"{rows} rows and {of_q[0]} tokens"
        )
    sinks = layer.sinks
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != torch.float32):
        refuse(f"sinks must be [{num_heads}], float32", sinks=sinks)
    if layer.sliding_window is not None and layer.sliding_window < 1:
        raise ValueError(f"sliding_window={layer.sliding_window} must be at least 1")


def refuse_rows(
    layer: AttentionLayer, num_tokens: int, cache_shape: Sequence[int], metadata: AttentionMetadata
) -> NoReturn:
    """Raise `ValueError` for the first row whose tokens or blocks do not exist."""
    for row in range(metadata.context_lens.shape[0]):
        check_row(row, layer, num_tokens, cache_shape, metadata)
    ends = metadata.cu_seqlens_q[[0, -1]].tolist()
    raise ValueError(f"rows have tokens {ends[0]} to {ends[1]}, but q has {num_tokens}")


def check_row(
    row: int,
    layer: AttentionLayer,
    num_tokens: int,
    cache_shape: Sequence[int],
    metadata: AttentionMetadata,
) -> None:
    """Raise `ValueError` if a row has tokens, or needs blocks, that do not exist."""
    num_blocks, block_size = cache_shape[1], cache_shape[3]
    start, end = metadata.cu_seqlens_q[row : row + 2].tolist()
    length, table = int(metadata.context_lens[row]), metadata.block_tables[row].numpy()
    if not (0 <= start < end <= num_tokens and end - start <= length):
        raise ValueError(
            f"row {row}: tokens {start} to {end} of {num_tokens} must be the last ones of its "
            f"context_len {length}"
        )
    if length > len(table) * block_size:
        raise ValueError(
            f"row {row}: context_len {length} does not fit into {len(table)} blocks of {block_size}"
        )
    first_seen = max(0, length - (end - start) + 1 - (layer.sliding_window or length))
    used = table[first_seen // block_size : -(-length // block_size)]
    wrong = used[(used < 0) | (used >= num_blocks)].tolist()
    if wrong:
        raise ValueError(f"row {row}: blocks {wrong[:4]} must be from 0 to {num_blocks - 1}")
