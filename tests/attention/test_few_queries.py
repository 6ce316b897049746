"""Rows of several tokens in numba's kernel, chunks and draft tokens: against torch, and bit for bit
against rows of one token.

Slots that no token was written to hold NaN.
"""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from numba import config, set_num_threads

from nanoserve.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.numba import PIECE, NumbaAttention
from nanoserve.attention.quantized_kv import quantize
from nanoserve.attention.torch import TorchAttention
from nanoserve.kernels.cpu.attention import attend

# The model's numbers, and what K and V are kept as. bfloat16 over int8 is `fixed_point`.
FLOAT, BFLOAT = torch.float32, torch.bfloat16
KINDS = {
    "float32": (FLOAT, None),
    "bfloat16": (BFLOAT, None),
    "float32 over int8": (FLOAT, "int8"),
    "float32 over fp8": (FLOAT, "fp8"),
    "bfloat16 over int8": (BFLOAT, "int8"),
    "bfloat16 over fp8": (BFLOAT, "fp8"),
}
CODE_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}
# What else the small suite and `example.py` compile: numba takes ten seconds of a core for each.
FEW_KINDS = ["float32", "bfloat16", "float32 over int8"]
# (new tokens, context): draft tokens stand between chunks, which are of one to three pieces.
ROWS = [(1, 37), (1, 5), (2, 2), (34, 50), (5, 64), (40, 40), (3, 33), (36, 71), (9, 17), (80, 90)]
# (window, soft cap, group, head_dim, block size)
SHAPES = [
    (None, None, 2, 16, 16),
    (None, 1.5, 1, 24, 3),
    (7, None, 7, 32, 4),
    (30, 1.5, 8, 8, 1),
    (1, None, 3, 40, 32),
    (12, None, 1, 64, 16),
]


class Batch:
    """Random queries, and a cache that their rows' contexts were written to."""

    def __init__(self, kind: str, shape: tuple[Any, ...], rows: list[tuple[int, int]]) -> None:
        torch.manual_seed(len(rows))
        self.rows, (dtype, self.codes) = rows, KINDS[kind]
        window, soft_cap, group, head_dim, self.block_size = shape
        self.layer = AttentionLayer(2 * group, 2, head_dim, 0.7 * head_dim**-0.5, window, soft_cap)
        num_new, contexts = zip(*rows, strict=True)
        blocks = [-(-context // self.block_size) for context in contexts]
        free = iter((torch.randperm(sum(blocks)) + 1).tolist())
        self.tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        for row, count in enumerate(blocks):
            self.tables[row, :count] = torch.tensor([next(free) for _ in range(count)])
        self.q = (torch.randn(sum(num_new), 2 * group, head_dim) * 3).to(dtype)
        self.kv = torch.full((2, sum(blocks) + 1, 2, self.block_size, head_dim), torch.nan)
        for row, context in enumerate(contexts):
            self.write(row, range(context), torch.randn(2, context, 2, head_dim))

    def write(self, row: int, tokens: range, x: torch.Tensor | float) -> None:
        """K and V of a row's tokens: [2, num_tokens, num_kv_heads, head_dim]."""
        at = torch.tensor(tokens)
        blocks = self.tables[row, at // self.block_size]
        self.kv[:, blocks, :, at % self.block_size] = (
            x if isinstance(x, float) else x.transpose(0, 1)
        )

    @property
    def starts(self) -> list[int]:
        return np.cumsum([0, *(n for n, _ in self.rows)]).tolist()

    def metadata(self) -> AttentionMetadata:
        num_new, contexts = zip(*self.rows, strict=True)
        return AttentionMetadata(
            positions=torch.empty(0),
            slot_mapping=torch.empty(0),
            cu_seqlens_q=torch.tensor(self.starts, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_tables=self.tables,
            num_decode_rows=num_new.count(1),
            max_query_len=max(num_new),
            max_context_len=max(contexts),
        )

    def attend(self, backend: AttentionBackend | None = None) -> torch.Tensor:
        """What numba makes of it, or another backend."""
        backend = backend or NumbaAttention()
        with torch.inference_mode():
            return backend.attend(self.layer, self.q, self.cache(), self.metadata())

    def cache(self) -> KVCache:
        if self.codes:
            return KVCache(*quantize(self.kv, CODE_DTYPES[self.codes]))
        return KVCache(self.kv.to(self.q.dtype))

    def one_by_one(self) -> torch.Tensor:
        """Compute each token as a row of its own: [num_tokens, num_heads, head_dim]."""
        ones, tables = [], []
        for row, (n, context) in enumerate(self.rows):
            ones += [(1, context - n + 1 + j) for j in range(n)]
            tables += [self.tables[row]] * n
        alone = object.__new__(Batch)
        vars(alone).update(vars(self), rows=ones, tables=torch.stack(tables))
        return alone.attend()


@pytest.mark.small(codes=[None, "int8"], shape=SHAPES[1:4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codes", [None, "int8", "fp8"])
def test_mixed_batches_against_torch(codes: str | None, shape: tuple[Any, ...]) -> None:
    batch = Batch(f"float32 over {codes}" if codes else "float32", shape, ROWS)
    wanted = batch.attend(TorchAttention())
    torch.testing.assert_close(batch.attend(), wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.small(kind=FEW_KINDS, shape=SHAPES[1:4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_what_it_is_in_a_row_of_its_own(kind: str, shape: tuple[Any, ...]) -> None:
    """Bits depend neither on chunks, nor on draft tokens, nor on prefix hits."""
    batch = Batch(kind, shape, ROWS)
    assert torch.equal(batch.attend(), batch.one_by_one())


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_share_a_row(num_threads: int) -> None:
    batch, backend = Batch("bfloat16", SHAPES[0], [(5, 300)]), NumbaAttention()
    alone = batch.attend(backend)
    set_num_threads(min(num_threads, config.NUMBA_NUM_THREADS))
    try:
        assert torch.equal(batch.attend(backend), alone)
    finally:
        NumbaAttention()


@pytest.mark.small(kind=FEW_KINDS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_no_token_touches_what_it_does_not_see(kind: str, window: int | None) -> None:
    """A guess whose K and V are NaN spoils itself and those behind it."""
    batch = Batch(kind, (window, *SHAPES[0][1:]), [(1, 20), (5, 34)])
    before = batch.attend()
    batch.write(1, range(31, 32), torch.nan)  # the third token of the row
    after = batch.attend()
    assert torch.equal(after[:3], before[:3])
    assert after[3:].isnan().all()
    # And what has left a token's window; the first of the row sees tokens 24 to 29.
    batch.write(1, range(31, 32), 0.5)
    batch.write(1, range(25), torch.nan)
    after = batch.attend()
    assert after[1].isnan().all()
    assert after[2:].isfinite().all() if window else after[2:].isnan().all()


def test_pieces_are_found_once_a_step() -> None:
    batch = Batch("float32", SHAPES[0], ROWS)
    metadata, cache, backend = batch.metadata(), batch.cache(), NumbaAttention()
    with torch.inference_mode():
        first = backend.attend(batch.layer, batch.q, cache, metadata)
        (found,) = metadata.scratch["numba"]
        second = backend.attend(batch.layer, batch.q, cache, metadata)
    assert metadata.scratch["numba"][0] is found
    assert torch.equal(first, second)
    tokens = [token for _, start, end, _ in found.tolist() for token in range(start, end)]
    assert sorted(tokens) == [*range(2, len(batch.q))]  # two decode rows, and everything else once
    assert max(end - start for _, start, end, _ in found.tolist()) == PIECE


def test_nothing_is_compiled_for_rows_of_several_tokens() -> None:
    """What `compile_ahead` compiles with a row of one token serves all."""
    Batch("bfloat16", SHAPES[0], [(1, 9)]).attend()
    compiled = list(attend.signatures)
    for rows in ([(5, 30)], [(1, 9), (2, 30), (20, 40)]):
        Batch("bfloat16", SHAPES[2], rows).attend()
    assert attend.signatures == compiled
