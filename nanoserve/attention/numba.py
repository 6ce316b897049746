"""Attention on a CPU with numba (extra: `nanoserve[cpu]`): a compiled kernel."""

import math
import os

import numpy as np
import torch
from numba import config, get_num_threads, set_num_threads
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.numba_checks import check_attention, refuse_rows
from nanoserve.kernels.cpu.attention import attend
from nanoserve.kernels.cpu.elements import ELEMENTS, address

# Tokens of a row that the kernel computes at a time: a multiple of the six queries of its inner
# loops, and so few that queries and scores stay in the processor's cache.
PIECE = 36
_NO_PIECES = torch.empty(0, 4, dtype=torch.int32)


class NumbaAttention(AttentionBackend):
    """A backend with a compiled kernel, whose results do not depend on the batch, to the bit.

    The kernel reads the K and V of a row in place, and once for `PIECE` tokens. It also reads an
    8-bit KV cache, which takes half the bytes of a 16-bit cache.
    """

    supports_value_dim = supports_sinks = True

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
        q, value_dim = q.contiguous(), layer.value_dim or layer.head_dim
        out = q.new_empty(*q.shape[:2], value_dim)
        tables, pieces = metadata.block_tables, _pieces(metadata, _piece_tokens(layer))
        tensors = q, out, metadata.cu_seqlens_q, tables, metadata.context_lens, cache
        num_wrong = attend(
            (
                *map(address, tensors),
                0 if scales is None else address(scales),
                address(pieces),
                0 if layer.sinks is None else address(layer.sinks),
            ),
            (
                metadata.num_decode_rows,
                len(pieces),
                q.shape[0],
                layer.num_heads,
                *tables.shape,
                *cache.shape,
                value_dim,
            ),
            layer.scale,
            layer.sliding_window or 2**31 - 1,
            layer.soft_cap or 0.0,
            # Threads split every decode row as evenly as its heads allow.
            math.gcd(layer.num_kv_heads, get_num_threads()),
            ELEMENTS[q.dtype],
            ELEMENTS[cache.dtype],
        )
        if num_wrong:
            refuse_rows(layer, q.shape[0], cache.shape, metadata)
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


def _piece_tokens(layer: AttentionLayer) -> int:
    """Return the tokens of a piece: fewer if all of many query heads share a KV head.

    With latent attention, a token has a query of 576 numbers and scores in 16 to 128 heads.
    """
    return PIECE if layer.value_dim is None else max(1, 4 * PIECE // layer.num_heads)


def _pieces(metadata: AttentionMetadata, num_tokens: int = PIECE) -> Tensor:
    """Return the pieces of the rows after the decode rows, int32 [num_pieces, 4].

    A piece is up to `num_tokens` tokens: (row, its first token, the next piece's first token, the
    context length of its last token).
    """
    num_single = metadata.num_decode_rows
    if num_single == metadata.num_rows:
        return _NO_PIECES
    if "numba" not in metadata.scratch:
        starts, lens = metadata.cu_seqlens_q.numpy(), metadata.context_lens.numpy()[num_single:]
        rows = np.arange(num_single, metadata.num_rows)
        pieces = np.stack([rows, starts[num_single:-1], starts[num_single + 1 :], lens], axis=1)
        if metadata.max_query_len > num_tokens:
            pieces = _cut(pieces, num_tokens)
        metadata.scratch["numba"] = (torch.from_numpy(pieces.astype(np.int32)),)
    return metadata.scratch["numba"][0]


def _cut(rows: np.ndarray, num_tokens: int) -> np.ndarray:
    """Cut rows, (row, first token, end, context length), into pieces of up to `num_tokens`."""
    _, first, end, lens = rows.T
    counts = np.maximum(1, -(-(end - first) // num_tokens))  # 1: the kernel refuses an empty row
    row = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)
    starts = first[row] + num_tokens * number
    ends = np.minimum(starts + num_tokens, end[row])
    pieces = np.stack([rows[row, 0], starts, ends, lens[row] - (end[row] - ends)], axis=1)
    # Later pieces of a row take longer. First, last, second, last but one, and so on: of this
    # order, consecutive parts take equally long.
    order = np.arange(len(pieces)) // 2
    order[1::2] = len(pieces) - 1 - order[1::2]
    return pieces[order]
