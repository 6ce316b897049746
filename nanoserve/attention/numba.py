"""Attention on a CPU with numba (extra: `nanoserve[cpu]`): a compiled kernel for short rows."""

import math
import os

import numpy as np
import torch
from numba import config, get_num_threads, set_num_threads
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.numba_checks import check_attention, check_row, refuse_rows
from nanoserve.attention.torch import attend_rows
from nanoserve.kernels.cpu.attention import attend_decode
from nanoserve.kernels.cpu.elements import ELEMENTS, address

# Maximum number of tokens of a row that the kernel computes: the last one and its draft tokens.
FEW = 33


class NumbaAttention(AttentionBackend):
    """A backend with a compiled kernel for rows of few tokens, and torch for longer ones.

    The kernel reads the K and V of a row in place and once for all its tokens. It also reads an
    8-bit KV cache, which takes half the bytes of a 16-bit cache.
    """

    def __init__(self) -> None:
        _refuse_forks()
        num_threads = torch.get_num_threads()
        set_num_threads(min(num_threads, config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]  # numba sets it
        # Starting numba's threads sets OpenMP's number, which is torch's too, to all cores.
        torch.set_num_threads(num_threads)

    def attend(
        self, layer: AttentionLayer, q: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        cache, scales = kv_cache.values, kv_cache.scales
        check_attention(layer, q, cache, scales, metadata)
        q = q.contiguous()
        out = torch.empty_like(q)
        num_tokens, num_single = q.shape[0], metadata.num_decode_rows
        few_at, num_few, longer = 0, 0, []
        if num_single < num_tokens:
            few, rows = _few_and_longer(metadata)
            few_at, num_few, longer = address(few), len(few), rows.tolist()
        if num_single or num_few:
            starts, tables = metadata.cu_seqlens_q, metadata.block_tables
            tensors = q, out, starts, tables, metadata.context_lens, cache
            sizes = *tables.shape, *cache.shape[1:]
            num_wrong = attend_decode(
                (*map(address, tensors), 0 if scales is None else address(scales), few_at),
                (num_single, num_few, num_tokens, layer.num_heads, *sizes),
                layer.scale,
                layer.sliding_window or 2**31 - 1,
                layer.soft_cap or 0.0,
                # Threads split every row as evenly as its heads allow.
                math.gcd(layer.num_kv_heads, get_num_threads()),
                ELEMENTS[q.dtype],
                ELEMENTS[cache.dtype],
            )
            if num_wrong:
                refuse_rows(layer, num_tokens, cache.shape, metadata)
        for row, start, end in longer:
            check_row(row, layer, num_tokens, cache.shape, metadata)
            out[start:end] = attend_rows(layer, q, kv_cache, metadata, row, row + 1)
        return out


_started: set[int] = set()  # ids of processes that started numba's threads; a fork inherits the set


def _refuse_forks() -> None:
    """Raise `RuntimeError` in a fork of a process that has such threads: OpenMP would abort it."""
    _started.add(os.getpid())
    if len(_started) > 1:
        _started.discard(os.getpid())
        raise RuntimeError(
            "this process was forked from one that has computed with numba: instead of fork, use "
            "spawn, as in multiprocessing.get_context('spawn')"
        )


def _few_and_longer(metadata: AttentionMetadata) -> tuple[Tensor, ...]:
    """Return the rows after the decode rows, split by length, both int32.

    Rows of few tokens: [num_few]. Longer rows: [num_longer, 3], each (row, its first token, the
    next row's first token).
    """
    if "numba" not in metadata.scratch:
        first, starts = metadata.num_decode_rows, metadata.cu_seqlens_q.numpy()
        is_few = np.diff(starts[first:]) <= FEW
        few, longer = (np.flatnonzero(rows) + first for rows in (is_few, ~is_few))
        longer = np.stack([longer, starts[longer], starts[longer + 1]], axis=1)
        metadata.scratch["numba"] = tuple(
            torch.from_numpy(rows.astype(np.int32)) for rows in (few, longer)
        )
    return metadata.scratch["numba"]
