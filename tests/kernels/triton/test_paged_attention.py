"""The paged-attention kernels against a float64 softmax over gathered keys.

Every slot that no token was written to, or that lies before all windows of its row, holds NaN, and
every unused column of a block table points far outside the cache: a kernel that reads what it must
not fails, whatever it does with it. Memory that a kernel should write holds NaN before it does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from program_order import ORDERS, programs_in_order

import nanoserve.kernels.triton.paged_attention as kernels
from nanoserve.kernels.triton.decode_attention_kernels import _find_row, _size_of_shares
from nanoserve.kernels.triton.paged_attention import paged_attention, tile_config
from nanoserve.kernels.triton.split_work import most_arrivals
from nanoserve.kernels.triton.tile_config import for_few_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TILE_N = tile_config(16, torch.float32, group=1, is_decode=True).tile_n


@dataclass
class Batch:
    q: torch.Tensor
    kv_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    num_decode_rows: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    row_counts: torch.Tensor | None = None
    arrivals: torch.Tensor | None = None

    def attend(self, num_shares: int | None = None, max_query_len: int | None = None) -> Any:
        with poisoned_memory():
            return paged_attention(
                self.q,
                self.kv_cache,
                self.cu_seqlens_q,
                self.context_lens,
                self.block_tables,
                scale=self.scale,
                num_decode_rows=self.num_decode_rows,
                max_context_len=int(self.context_lens.max()),
                num_shares=num_shares,
                max_query_len=max_query_len,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                row_counts=self.row_counts,
                arrivals=self.arrivals,
            )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within, torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000, device=DEVICE).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_batch(
    rows: list[tuple[int, int]],  # (query tokens, context), decode rows first
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    blocks_of_row = [-(-context // block_size) for _, context in rows]
    num_blocks = sum(blocks_of_row) + 1  # block 0 is nobody's
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    kv_cache = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), torch.nan)
    block_tables = torch.full((len(rows), max(blocks_of_row) + 2), 2**30, dtype=torch.int32)
    for row, (query_len, context) in enumerate(rows):
        first_seen = max(0, context - query_len + 1 - (sliding_window or context))
        for column, start in enumerate(range(0, context, block_size)):
            block, end = free.pop(), min(block_size, context - start)
            begin = max(0, first_seen - start)
            if begin < end:
                block_tables[row, column] = block
                shape = (2, num_kv_heads, end - begin, head_dim)
                kv_cache[:, block, :, begin:end] = torch.randn(shape, generator=generator)
    query_lens = torch.tensor([0] + [query_len for query_len, _ in rows])
    q = torch.randn(int(query_lens.sum()), num_heads, head_dim, generator=generator)
    return Batch(
        q.to(DEVICE, dtype),
        kv_cache.to(DEVICE, dtype),
        query_lens.cumsum(0).to(DEVICE, torch.int32),
        torch.tensor([context for _, context in rows], dtype=torch.int32, device=DEVICE),
        block_tables.to(DEVICE),
        num_decode_rows=sum(query_len == 1 for query_len, _ in rows),
        scale=head_dim**-0.5,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )


def reference(batch: Batch) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim] in float64, row by row, with an explicit mask."""
    q, (k_cache, v_cache) = batch.q.double().cpu(), batch.kv_cache.double().cpu()
    starts, group = batch.cu_seqlens_q.tolist(), q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    for row, context in enumerate(batch.context_lens.tolist()):
        tokens, window = slice(starts[row], starts[row + 1]), batch.sliding_window or context
        query_positions = torch.arange(context - len(q[tokens]), context)[:, None]
        positions = torch.arange(max(0, int(query_positions[0]) + 1 - window), context)
        blocks = batch.block_tables[row].cpu()[positions // k_cache.shape[2]].long()
        offsets = positions % k_cache.shape[2]
        k = k_cache[blocks, :, offsets].repeat_interleave(group, dim=1)
        v = v_cache[blocks, :, offsets].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[tokens], k) * batch.scale
        if batch.soft_cap is not None:
            scores = batch.soft_cap * torch.tanh(scores / batch.soft_cap)
        hidden = (positions > query_positions) | (positions <= query_positions - window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def assert_right(
    batch: Batch, num_shares: int | None = None, max_query_len: int | None = None
) -> None:
    out = batch.attend(num_shares, max_query_len)
    assert out.shape == batch.q.shape and out.dtype == batch.q.dtype and out.is_contiguous()
    error = (out.double().cpu() - reference(batch)).abs().max().item()
    assert error < TOLERANCE[batch.q.dtype]  # false for NaN


def ragged_rows(seed: int) -> list[tuple[int, int]]:
    """Decode rows, whole prompts and chunks behind a prefix, of random lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    decodes = [(1, draw(1, 60)) for _ in range(draw(0, 3))]
    chunks = []
    for _ in range(draw(0 if decodes else 1, 4)):
        query_len = draw(2, 40)
        prefix_len = draw(0, 1) * draw(1, 50)
        chunks.append((query_len, prefix_len + query_len))
    return decodes + chunks


@pytest.mark.small(seed=[0, 11, 22, 33])  # of different groups, block sizes and head_dims
@pytest.mark.full(seed=[*range(40), *range(44, 80, 11)])
@pytest.mark.parametrize("seed", range(80))
def test_ragged_mixed_batches(seed: int) -> None:
    group = seed % 8 + 1
    num_kv_heads = (1, 2, 1)[seed % 3]
    assert_right(
        make_batch(
            ragged_rows(seed),
            num_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=(16, 16, 32, 64)[seed % 4],
            block_size=(16, 32, 64, 16, 256, 128)[seed % 6],
            seed=seed,
        )
    )


@pytest.mark.small(dtype=[torch.bfloat16], head_dim=[24, 80, 256])
@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_dims_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    rows = [(1, 41), (7, 7), (5, 36)]
    assert_right(make_batch(rows, num_heads=4, num_kv_heads=2, head_dim=head_dim, dtype=dtype))


@pytest.mark.small(group=[1, 3, 16], num_kv_heads=[1])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_query_heads_share_a_kv_head(group: int, num_kv_heads: int) -> None:
    rows = [(1, 20), (3, 3), (6, 30)]
    assert_right(make_batch(rows, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads))


@pytest.mark.small(block_size=[1, 3, 256])
@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 16, 24, 32, 64, 128, 256])
def test_block_sizes(block_size: int) -> None:
    assert_right(make_batch([(1, 50), (9, 9), (12, 45)], block_size=block_size))


BORDERS = sorted(
    {border + step for border in (16, 32, TILE_N, 2 * TILE_N, 64) for step in (-1, 0, 1)}
)


@pytest.mark.small(query_len=[1, 17], context_len=[1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("context_len", [1, 2, *BORDERS])
@pytest.mark.parametrize("query_len", [1, 2, 15, 16, 17, 33])
def test_contexts_around_the_borders_of_blocks_and_tiles(query_len: int, context_len: int) -> None:
    context_len = max(query_len, context_len)
    assert_right(make_batch([(query_len, context_len)], seed=100 * query_len + context_len))


@pytest.mark.small(num_shares=[3])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 8, 13])
@pytest.mark.parametrize(
    "context_lens", [(1,), (15, 16, 17), (100, 1, 33), (TILE_N * 8 + 1, TILE_N * 8), (130,)]
)
def test_decode_rows_cut_into_shares(num_shares: int, context_lens: tuple[int, ...]) -> None:
    rows = [(1, context_len) for context_len in context_lens]
    batch = make_batch(rows, num_heads=6, num_kv_heads=2, head_dim=24)
    assert_right(batch, num_shares)


@pytest.mark.parametrize(
    ("context_lens", "sliding_window", "expected"),
    [
        ((40 * TILE_N,), None, 16),  # as many as there are places
        ((2 * TILE_N - 1, 1), None, 6),  # tiles that there may be, with one that a window may cut
        ((40 * TILE_N,), 2 * TILE_N, 4),
    ],
)
def test_there_are_as_many_shares_as_programs_run_at_once(
    monkeypatch: pytest.MonkeyPatch,
    context_lens: tuple[int, ...],
    sliding_window: int | None,
    expected: int,
) -> None:
    num_shares, choose = [], kernels._num_shares

    def choose_and_note(*args: Any) -> int:
        num_shares.append(choose(*args))
        return num_shares[-1]

    monkeypatch.setattr(kernels, "_num_shares", choose_and_note)
    rows = [(1, context_len) for context_len in context_lens]
    assert_right(make_batch(rows, sliding_window=sliding_window))
    assert num_shares == [expected]


def test_more_rows_and_more_parts_than_are_looked_at_at_once(by_size: Callable[..., Any]) -> None:
    most = by_size(TILE_N, 2 * TILE_N)  # a tile or two of each of more than 256 rows
    rows = [(1, 1 + 7 * i % most) for i in range(by_size(258, 300))]
    assert_right(make_batch(rows, num_heads=by_size(1, 2)), num_shares=5)
    assert_right(make_batch([(1, 40 * TILE_N - 3), (1, 2)]), num_shares=41)


def test_codes_are_read_in_tiles_of_more_keys_where_that_was_measured() -> None:
    """And where registers suffice: in tiles of 16 rows, and where programs have most memory."""

    def chosen(head_dim: int = 128, group: int = 8, kib: int = 227, **kinds: Any) -> Any:
        kinds = {"dtype": torch.bfloat16, "is_decode": True, "has_codes": True} | kinds
        return tile_config(head_dim, group=group, shared_memory=kib * 1024, **kinds)

    many = chosen()
    assert (many.tile_n, many.num_warps, many.num_stages, many.num_programs) == (128, 4, 5, 2)
    assert many == chosen(80) == chosen(group=16) == chosen(dtype=torch.float16)
    for other in (chosen(64), chosen(group=17), chosen(kib=163), chosen(has_codes=False)):
        assert other.tile_n == 64
    assert for_few_tokens(many, 16) == many
    for block_m in (32, 64):
        assert for_few_tokens(many, block_m) == for_few_tokens(chosen(kib=163), block_m)
    prompts = chosen(is_decode=False)
    assert prompts == chosen(is_decode=False, has_codes=False)
    assert chosen(64, is_decode=False) == prompts._replace(num_stages=3)


WINDOWS = [1, 2, 3, 15, 16, 17, TILE_N - 1, TILE_N, TILE_N + 1, 2 * TILE_N + 5, 1000]


@pytest.mark.small(seed=[9, 18, 27])  # of different windows, soft caps, groups and head_dims
@pytest.mark.parametrize("seed", range(44))
def test_windows_and_soft_caps_in_ragged_mixed_batches(seed: int) -> None:
    group, num_kv_heads = seed % 8 + 1, (1, 2, 1)[seed % 3]
    batch = make_batch(
        ragged_rows(1000 + seed),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=(16, 24, 16, 64)[seed % 4],
        block_size=(16, 32, 5, 64, 256)[seed % 5],
        seed=seed,
        sliding_window=WINDOWS[seed % 11],
        soft_cap=(None, 0.5, 2.0, 50.0)[seed // 11 % 4],
    )
    assert_right(batch)
    if batch.num_decode_rows:
        assert_right(batch, num_shares=seed % 5 + 2)


@pytest.mark.small(sliding_window=[5, 3 * TILE_N], first_seen=[0, 16, TILE_N - 1])
@pytest.mark.parametrize("first_seen", [0, 1, *BORDERS])
@pytest.mark.parametrize("sliding_window", [1, 5, TILE_N, 3 * TILE_N])
def test_windows_that_begin_around_the_borders_of_blocks_and_tiles(
    first_seen: int, sliding_window: int
) -> None:
    query_lens = (1, 2, 17, 40)
    rows = [(n, first_seen + sliding_window + n - 1) for n in query_lens]
    assert_right(make_batch(rows, sliding_window=sliding_window))


@pytest.mark.small(num_shares=[3], sliding_window=[1, TILE_N + 1, 1000])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("sliding_window", [1, 2, TILE_N, TILE_N + 1, 5 * TILE_N - 1, 1000])
def test_decode_rows_with_windows_cut_into_shares(num_shares: int, sliding_window: int) -> None:
    context_lens = (TILE_N * 8 + 1, 1, TILE_N * 8, 33, TILE_N * 6 - 5)
    rows = [(1, context_len) for context_len in context_lens]
    batch = make_batch(rows, num_heads=6, num_kv_heads=2, sliding_window=sliding_window)
    assert_right(batch, num_shares)


def test_a_window_that_holds_the_context_changes_nothing() -> None:
    batch = make_batch([(1, 70), (1, 9), (20, 70)])
    without = batch.attend()
    for batch.sliding_window in (70, 71, 10_000):
        assert torch.equal(batch.attend(), without)


@triton.jit
def share_kernel(
    found_ptr, cu_seqlens_q_ptr, context_lens_ptr, num_rows, sliding_window, TILE_N: tl.constexpr
):
    share, num_shares = tl.program_id(0), tl.num_programs(0)
    size, num_tiles = _size_of_shares(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, num_shares, sliding_window, TILE_N
    )
    row, before = _find_row(
        cu_seqlens_q_ptr, context_lens_ptr, num_rows, share * size, sliding_window, TILE_N
    )
    tl.store(found_ptr + 4 * share, size)
    tl.store(found_ptr + 4 * share + 1, num_tiles)
    tl.store(found_ptr + 4 * share + 2, row)
    tl.store(found_ptr + 4 * share + 3, before)


@pytest.mark.small(num_shares=[7], sliding_window=[None, 8])
@pytest.mark.parametrize("num_shares", [1, 2, 7])
@pytest.mark.parametrize("sliding_window", [None, 1, 8, 30])
@pytest.mark.parametrize(
    ("num_rows", "most_queries"), [(1, 1), (3, 1), (256, 1), (257, 1), (600, 1), (3, 5), (257, 5)]
)
def test_shares_are_equal_and_begin_in_the_right_row(
    num_rows: int, most_queries: int, sliding_window: int | None, num_shares: int
) -> None:
    context_lens = [13 * i % 50 for i in range(num_rows)]  # a row of nothing is before others
    context_lens[-1] = 30
    query_lens = [max(1, min(n, i % most_queries + 1)) for i, n in enumerate(context_lens)]
    tiles_of = [
        # Those that its queries see, the first one too.
        -(-n // 8) - max(0, n - q + 1 - (sliding_window or n)) // 8
        for n, q in zip(context_lens, query_lens, strict=True)
    ]
    rows = [row for row, num_tiles in enumerate(tiles_of) for _ in range(num_tiles)]
    found = torch.full((num_shares, 4), -1, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([7, *query_lens], dtype=torch.int32).cumsum(0).to(DEVICE, torch.int32)
    lens = torch.tensor(context_lens, dtype=torch.int32, device=DEVICE)
    share_kernel[(num_shares,)](
        found, starts if most_queries > 1 else None, lens, num_rows, sliding_window, TILE_N=8
    )
    size = -(-len(rows) // num_shares)
    for share, (*counts, row, before) in enumerate(found.tolist()):
        assert counts == [size, len(rows)]
        if share * size < len(rows):
            assert (row, before) == (rows[share * size], sum(tiles_of[:row]))


@pytest.mark.small(num_shares=[3], query_lens=[(2, 7, 5)])
@pytest.mark.parametrize("num_shares", [1, 2, 5])
@pytest.mark.parametrize("sliding_window", [None, 1, TILE_N + 3])
@pytest.mark.parametrize("query_lens", [(2,), (2, 7, 5), (17, 1, 3, 16), (32, 31)])
def test_rows_of_few_tokens_cut_into_shares(
    query_lens: tuple[int, ...], sliding_window: int | None, num_shares: int
) -> None:
    """An early query sees nothing of a late share, and a late one nothing of an early share."""
    rows = [(n, n + (6 * TILE_N + 5, 0, 3 * TILE_N - 1, 17)[i]) for i, n in enumerate(query_lens)]
    batch = make_batch(rows, sliding_window=sliding_window)
    batch.num_decode_rows = 0
    assert_right(batch, num_shares, max_query_len=max(query_lens))


@pytest.mark.small(seed=[8, 21])
@pytest.mark.full(seed=[*range(0, 24, 2), 3, 9, 21])  # the interpreter takes seconds for some
@pytest.mark.parametrize("seed", range(24))
def test_ragged_rows_of_few_tokens_behind_decode_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(0, 3 * TILE_N, (5,), generator=generator).tolist()
    rows = [(1, 1 + n) for n in draw[:2]] + [(2 + n % 8, 2 + n % 8 + n) for n in draw[2:]]
    group, num_kv_heads = seed % 7 + 1, (1, 2, 1)[seed % 3]
    batch = make_batch(
        rows,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=(16, 24, 16, 64)[seed % 4],
        block_size=(16, 32, 5, 64, 256)[seed % 5],
        dtype=(torch.float32, torch.bfloat16)[seed % 2],
        seed=seed,
        sliding_window=(None, *WINDOWS)[seed % 12],
        soft_cap=(None, 2.0)[seed // 3 % 2],
    )
    assert_right(batch, seed % 5 + 1 if seed % 5 else None, max_query_len=max(n for n, _ in rows))


def test_rows_of_many_tokens_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([(1, 9), (33, 40)], num_heads=4, num_kv_heads=2)
    chunks, attend = [], kernels._attend_chunks

    def attend_and_note(*args: Any) -> None:
        chunks.append(args[-2:])
        attend(*args)

    monkeypatch.setattr(kernels, "_attend_chunks", attend_and_note)
    assert_right(batch, max_query_len=33)  # 64 tokens x 2 heads
    assert chunks == [(1, 1)]


def with_room(batch: Batch, num_rows: int, num_tokens: int) -> Batch:
    """As a graph of so many rows and tokens sees it. What is no row's is NaN, or far outside."""
    rows, tokens = len(batch.context_lens), len(batch.q)
    padding = torch.full((num_tokens - tokens, *batch.q.shape[1:]), torch.nan)
    far = torch.full((num_rows - rows, batch.block_tables.shape[1]), 2**30, dtype=torch.int32)
    counts = torch.tensor([9, rows, batch.num_decode_rows, 9], dtype=torch.int32)
    return replace(
        batch,
        q=torch.cat([batch.q, padding.to(batch.q)]),
        cu_seqlens_q=torch.cat([batch.cu_seqlens_q, far[:, 0].to(DEVICE)]),
        context_lens=torch.cat([batch.context_lens, far[:, 0].to(DEVICE)]),
        block_tables=torch.cat([batch.block_tables, far.to(DEVICE)]),
        num_decode_rows=0,
        row_counts=counts.to(DEVICE)[1:3],  # in the middle of a header, as in a step's buffer
    )


@pytest.mark.small(seed=[1, 12, 23, 34])
@pytest.mark.full(seed=range(0, 44, 2))
@pytest.mark.parametrize("seed", range(44))
def test_one_launch_is_right_for_every_mix_of_rows(seed: int) -> None:
    """How many rows there are of both kinds is read on the GPU, and what is behind them is not."""
    group, num_kv_heads = seed % 8 + 1, (1, 2, 1)[seed % 3]
    drawn = ragged_rows(2000 + seed)
    rows = [row for row in drawn if seed % 6 > 1 or (row[0] > 1) == seed % 6]  # or of one kind
    batch = make_batch(
        rows or drawn,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=(16, 24, 16, 64)[seed % 4],
        block_size=(16, 32, 5, 64, 256)[seed % 5],
        seed=seed,
        sliding_window=(None, *WINDOWS)[seed % 12],
        soft_cap=(None, 2.0)[seed // 2 % 2],
    )
    tokens, num_rows = len(batch.q), len(batch.context_lens)
    padded = with_room(batch, num_rows + seed % 5, tokens + seed % 50)
    out = padded.attend(num_shares=seed % 5 + 1)
    assert out[tokens:].isnan().all()  # nobody has written there
    error = (out[:tokens].double().cpu() - reference(batch)).abs().max().item()
    assert error < TOLERANCE[torch.float32]


def test_rows_of_two_tokens_fill_the_launch() -> None:
    """Of several tokens there can be no more rows than these, and no more tiles."""
    for tokens in (2, 3):
        batch = make_batch([(2, 2)] * 20 + [(tokens, 30)])
        padded = with_room(batch, 64, len(batch.q))
        error = (padded.attend().double().cpu() - reference(batch)).abs().max().item()
        assert error < TOLERANCE[torch.float32]


LONG = 6 * TILE_N + 5
# Rows (query tokens, context), what they are attended with, and what distinguishes the batch.
CUT: dict[str, tuple[list[tuple[int, int]], dict[str, Any], dict[str, Any]]] = {
    "one row": ([(1, LONG)], {"num_shares": 5}, {"num_heads": 6, "num_kv_heads": 2}),
    "rows": ([(1, LONG), (1, 1), (1, 2 * LONG), (1, 33)], {"num_shares": 7}, {"head_dim": 24}),
    "a tile a share": ([(1, 40 * TILE_N - 3), (1, 2)], {"num_shares": 41}, {}),
    "windows": ([(1, LONG), (1, LONG)], {"num_shares": 5}, {"sliding_window": 2 * TILE_N + 1}),
    "few tokens": ([(2, LONG), (7, 9), (5, LONG)], {"num_shares": 5, "max_query_len": 7}, {}),
    "mixed": ([(1, LONG), (1, LONG), (9, 30)], {"num_shares": 5}, {"soft_cap": 2.0}),
    "bfloat16": ([(1, LONG), (1, 3)], {"num_shares": 3}, {"dtype": torch.bfloat16}),
}


def counters() -> torch.Tensor:
    return torch.zeros(most_arrivals(torch.device(DEVICE)), dtype=torch.int32, device=DEVICE)


@pytest.mark.small(order=["backwards"])
@pytest.mark.parametrize("order", ORDERS if DEVICE == "cpu" else ["forwards"])
@pytest.mark.parametrize("cut", CUT)
def test_the_share_that_arrives_last_merges_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch, cut: str, order: str
) -> None:
    """Parts are added in their own order, so that the order of arrival changes no bit."""
    rows, arguments, kinds = CUT[cut]
    batch = make_batch(rows, **kinds)
    if cut == "mixed":
        batch = with_room(batch, len(rows), len(batch.q))
    if cut == "few tokens":
        batch.num_decode_rows = 0
    merged = batch.attend(**arguments)
    monkeypatch.setattr(kernels, "merge_parts_kernel", None)  # it is not launched
    batch.arrivals = counters()
    forwards = batch.attend(**arguments)
    assert not batch.arrivals.any()  # ready for the next launch
    error = (forwards.double().cpu() - reference(replace(batch, row_counts=None))).abs().max()
    assert error.item() < TOLERANCE[batch.q.dtype]
    assert torch.allclose(forwards, merged, atol=TOLERANCE[batch.q.dtype] / 10)
    if order == "forwards":
        assert torch.equal(batch.attend(**arguments), forwards)
        return
    with programs_in_order(1, order) as ran:
        assert torch.equal(batch.attend(**arguments), forwards)
    assert ran[: arguments["num_shares"]] != sorted(ran[: arguments["num_shares"]])
    assert not batch.arrivals.any()


def test_counters_of_arrivals_that_do_not_begin_at_zero_are_a_fault_that_shows() -> None:
    """That the tests above can fail: a row is merged too early, and its counter is not zero."""
    batch = make_batch([(1, LONG)])
    batch.arrivals = counters()
    right = batch.attend(num_shares=3)
    batch.arrivals[0] = 1
    assert not torch.equal(batch.attend(num_shares=3), right)
    assert batch.arrivals.any()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, dtype=torch.int32), torch.zeros(1000), torch.zeros(1, 1000).int()]
)
def test_there_must_be_a_counter_for_every_program(wrong: torch.Tensor) -> None:
    batch = replace(make_batch([(1, 20)]), arrivals=wrong)
    with pytest.raises(ValueError, match=r"arrivals must be int32 \[264\] or longer, not torch"):
        batch.attend()
    batch.arrivals = torch.zeros(264, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"arrivals must be int32 \[265\] or longer"):
        batch.attend(num_shares=265)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3, dtype=torch.int32), torch.zeros(2), torch.zeros(4, dtype=torch.int32)[::2]],
    ids=str,
)
def test_row_counts_on_the_device_are_two_integers(wrong: torch.Tensor) -> None:
    batch = replace(make_batch([(1, 20), (2, 2)]), row_counts=wrong)
    with pytest.raises(ValueError, match=r"row_counts must be contiguous int32 \[2\], rows and"):
        batch.attend()


@pytest.mark.small(sliding_window=[None, 3])
@pytest.mark.parametrize("sliding_window", [None, 1, 3])
def test_padding_rows_share_the_dummy_block(sliding_window: int | None) -> None:
    rows = [(1, 20), (1, 5), (1, 1), (1, 1), (1, 1)]
    batch = make_batch(rows, sliding_window=sliding_window)
    batch.block_tables[2:] = 0
    batch.kv_cache[:, 0, :, 0] = 1.0
    assert_right(batch)
    assert_right(batch, num_shares=4)


def test_q_may_be_a_slice_of_the_fused_projection() -> None:
    batch = make_batch([(1, 20), (1, 3), (10, 30)], num_heads=4, num_kv_heads=2, head_dim=32)
    fused = torch.full((len(batch.q), 4 + 2 + 2, 32), torch.nan, device=DEVICE)
    fused[:, :4] = batch.q
    batch.q = fused[:, :4]
    assert not batch.q.is_contiguous()
    assert_right(batch)


@pytest.mark.small(order=[(2, 0, 3, 1, 4)])
@pytest.mark.parametrize("order", [(0, 1, 3, 2, 4), (1, 0, 2, 3, 4), (2, 0, 3, 1, 4)])
def test_kv_cache_may_be_laid_out_in_another_order(order: tuple[int, ...]) -> None:
    batch = make_batch([(1, 20), (1, 3), (10, 30)], num_heads=6, num_kv_heads=3)
    laid_out = batch.kv_cache.permute(order).contiguous()
    back = [order.index(dim) for dim in range(5)]
    batch.kv_cache = laid_out.permute(back)
    assert not batch.kv_cache.is_contiguous()
    assert_right(batch)


def test_block_tables_may_be_columns_of_a_wider_buffer() -> None:
    batch = make_batch([(1, 40), (9, 30)])
    wider = torch.full((2, 50), -1, dtype=torch.int32, device=DEVICE)
    wider[:, : batch.block_tables.shape[1]] = batch.block_tables
    batch.block_tables = wider[:, : batch.block_tables.shape[1]]
    assert_right(batch)


def test_rows_of_one_token_may_be_counted_as_chunks() -> None:
    batch = make_batch([(1, 40), (1, 1), (9, 30)])
    batch.num_decode_rows = 1
    assert_right(batch)


def test_a_token_does_not_depend_on_what_comes_after_it() -> None:
    batch = make_batch([(20, 20)])
    whole = batch.attend()
    batch.kv_cache[:, batch.block_tables[0, 1]] = 2.0
    assert torch.equal(batch.attend()[:16], whole[:16])
    assert not torch.equal(batch.attend()[16:], whole[16:])


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch([(1, 70), (9, 40)])
    batch.q *= 1000
    out = batch.attend(num_shares=3)
    assert (out.double().cpu() - reference(batch)).abs().max() < 1e-2


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("scale", [1e-30, 0.01, 3.0])
def test_any_positive_scale(scale: float, soft_cap: float | None) -> None:
    """The largest score is looked for before it is scaled; hidden ones stay -inf."""
    batch = make_batch([(1, 70), (9, 40)], soft_cap=soft_cap, sliding_window=37)
    batch.scale = scale
    assert_right(batch)
    assert_right(batch, num_shares=3)


@pytest.mark.small(factor=[1, 1e30])
@pytest.mark.parametrize("factor", [1e-3, 1, 100, 1e30])
def test_soft_caps_hold_scores_of_any_size(factor: float) -> None:
    batch = make_batch([(1, 70), (9, 40)], soft_cap=3.0)
    batch.q *= factor
    assert_right(batch)
    assert_right(batch, num_shares=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 16)}, "3 heads must be a multiple of 2 KV heads"),
        ({"q": torch.zeros(2, 4, 32)}, "the same head_dim, not 32 and 16"),
        ({"q": torch.zeros(2, 16, 4).transpose(1, 2)}, "last strides must be 1"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float64)}, "must have dtype"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, "must have dtype"),
        ({"q": torch.zeros(2, 64)}, "must be 3-D"),
        ({"context_lens": torch.ones(2, dtype=torch.int64)}, "must be int32"),
        ({"context_lens": torch.ones(3, dtype=torch.int32)}, "lengths \\[3, 3, 2\\]"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": -0.25}, "scale=-0.25"),
        ({"scale": torch.nan}, "scale=nan"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    batch = make_batch([(1, 4), (1, 5)], num_heads=4, num_kv_heads=2)
    for name, value in change.items():
        setattr(batch, name, value.to(DEVICE) if isinstance(value, torch.Tensor) else value)
    with pytest.raises(ValueError, match=message):
        batch.attend()
