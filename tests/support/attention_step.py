"""A step over a small cache, for tests of attention backends that compare them to each other."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCacheSpec
from nanoserve.attention.torch import TorchAttention

# (new tokens, context): contexts inside of the window, and long ones; chunks longer than a window.
DECODES = [(1, 37), (1, 2), (1, 89)]
FEW = [(2, 2), (5, 44), (3, 90)]
NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="pip install 'nanoserve[cpu]'")
TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
BACKENDS = ["torch", pytest.param("numba", marks=NUMBA), pytest.param("triton", marks=TRITON)]


def make_backend(name: str) -> AttentionBackend:
    if name == "torch":
        return TorchAttention()
    if name == "numba":
        from nanoserve.attention.numba import NumbaAttention

        return NumbaAttention()
    from nanoserve.attention.triton import TritonAttention

    backend = TritonAttention()
    backend.longest_cut = 8  # so that rows of few tokens are cut into shares, as decode rows are
    return backend


class Step:
    """Random K and V, stored in a cache of one format, and queries."""

    def __init__(
        self, rows: list[tuple[int, int]], layer: AttentionLayer, kind: str, block_size: int
    ) -> None:
        torch.manual_seed(block_size)
        self.rows, self.layer, self.block_size = rows, layer, block_size
        num_new, contexts = zip(*rows, strict=True)
        blocks = [-(-context // block_size) for context in contexts]
        order = (torch.randperm(sum(blocks)) + 1).int()
        self.tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        for row, own in enumerate(order.split(blocks)):
            self.tables[row, : len(own)] = own
        self.q = torch.randn(sum(num_new), layer.num_heads, layer.head_dim)
        spec = KVCacheSpec.of_format(
            block_size, layer.num_kv_heads, layer.head_dim, torch.float32, kind
        )
        (self.cache,) = spec.allocate(1, sum(blocks) + 1)
        kv = torch.randn(2, (sum(blocks) + 1) * block_size, layer.num_kv_heads, layer.head_dim)
        self.cache.store(*kv, torch.arange(kv.shape[1], dtype=torch.int32))
        self.starts = torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32)

    def first_seen(self, row: int) -> int:
        num_new, context = self.rows[row]
        return max(0, context - num_new + 1 - self.layer.sliding_window)

    def spoil(self) -> None:
        """Write NaN to what is not seen, in floats or as a scale."""
        self._spoil(0, self.block_size)
        for row in range(len(self.rows)):
            whole, slots = divmod(self.first_seen(row), self.block_size)
            for column in range(whole):
                self._spoil(int(self.tables[row, column]), self.block_size)
            self._spoil(int(self.tables[row, whole]), slots)

    def _spoil(self, block: int, num_slots: int) -> None:
        spoilt = self.cache.values if self.cache.scales is None else self.cache.scales
        spoilt[:, block, :, :num_slots] = torch.nan

    def give_back(self) -> None:
        """Put the dummy block into block tables for blocks that are not seen."""
        for row in range(len(self.rows)):
            self.tables[row, : self.first_seen(row) // self.block_size] = 0

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        num_new, contexts = zip(*self.rows, strict=True)
        metadata = AttentionMetadata(
            positions=torch.empty(0),
            slot_mapping=torch.empty(0),
            cu_seqlens_q=self.starts,
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=self.tables,
            num_decode_rows=num_new.count(1),
            max_query_len=max(num_new),
            max_context_len=max(contexts),
        )
        with torch.inference_mode():
            return backend.attend(self.layer, self.q, self.cache, metadata)
