"""Torch's attention is a textbook's, and reads nothing of what its neighbours leave behind."""

import numpy as np
import pytest
import torch

from nanoserve.attention import torch as torch_attention
from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.torch import TorchAttention

BLOCK_SIZE = 4


def metadata_of(rows: list[tuple[int, int]], tables: torch.Tensor) -> AttentionMetadata:
    """`rows` are (new tokens, context), those of one token first."""
    num_new, contexts = zip(*rows, strict=True)
    return AttentionMetadata(
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),  # all is stored already
        cu_seqlens_q=torch.tensor([0, *np.cumsum(num_new)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        num_decode_rows=num_new.count(1),
        max_query_len=max(num_new),
        max_context_len=max(contexts),
    )


@pytest.mark.small(slots_at_once=[1, 40], num_kv_heads=[2])
@pytest.mark.parametrize("sliding_window", [None, 1, 6])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("slots_at_once", [1, 40, 8192])
def test_decode_rows_and_chunks_are_those_of_a_textbook(
    sliding_window: int | None,
    soft_cap: float | None,
    num_kv_heads: int,
    slots_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many rows of one token go together. Every slot without a token holds NaN."""
    monkeypatch.setattr(torch_attention, "_SLOTS_AT_ONCE", slots_at_once)
    torch.manual_seed(0)
    layer = AttentionLayer(4, num_kv_heads, 8, 0.3, sliding_window, soft_cap)
    rows = [(1, 1), (1, 19), (1, 4), (1, 13), (2, 2), (5, 17), (3, 4)]
    blocks = [-(-context // BLOCK_SIZE) for _, context in rows]
    kv_cache = torch.full((2, sum(blocks) + 1, num_kv_heads, BLOCK_SIZE, 8), torch.nan)
    # Behind its own, a row's table goes on with whatever blocks an owner before it had.
    tables = torch.randint(sum(blocks) + 1, (len(rows), max(blocks) + 1), dtype=torch.int32)
    free = iter((torch.randperm(sum(blocks)) + 1).tolist())
    q = torch.randn(sum(n for n, _ in rows), 4, 8)
    expected, first = torch.empty(q.shape, dtype=torch.float64), 0
    for row, (num_new, context) in enumerate(rows):
        k, v = torch.randn(2, num_kv_heads, context, 8)
        for column, start in enumerate(range(0, context, BLOCK_SIZE)):
            tables[row, column] = block = next(free)
            for cache, x in zip(kv_cache, (k, v), strict=True):
                filled = x[:, start : start + BLOCK_SIZE]
                cache[block, :, : filled.shape[1]] = filled
        k, v = (x.double().repeat_interleave(4 // num_kv_heads, dim=0) for x in (k, v))
        scores = q[first : first + num_new].double().transpose(0, 1) @ k.mT * 0.3
        scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
        distance = torch.arange(context - num_new, context)[:, None] - torch.arange(context)
        hidden = (distance < 0) | (distance >= (sliding_window or context))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        expected[first : first + num_new] = (weights @ v).transpose(0, 1)
        first += num_new
    attended = TorchAttention().attend(layer, q, KVCache(kv_cache), metadata_of(rows, tables))
    torch.testing.assert_close(attended.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("num_new", [1, 2])
@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_one_sequence_stays_there(
    dtype: torch.dtype, soft_cap: float | None, num_new: int
) -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(4, 2, 8, 0.3, soft_cap=soft_cap)
    q = torch.randn(2 * num_new, 4, 8).to(dtype)
    kv_cache = torch.randn(2, 5, 2, BLOCK_SIZE, 8).to(dtype)
    # The second row uses its first block only; the other ones are stale: the first row's.
    tables = torch.tensor([[1, 2, 3], [4, 2, 3]], dtype=torch.int32)
    metadata = metadata_of([(num_new, 11), (num_new, 3)], tables)
    expected = TorchAttention().attend(layer, q, KVCache(kv_cache), metadata)
    kv_cache[:, 1:4] = torch.nan  # the first row's, and behind the end of the second one's table
    kv_cache[:, 4, :, 3] = torch.nan  # what an owner before left in the second row's block
    actual = TorchAttention().attend(layer, q, KVCache(kv_cache), metadata)
    assert actual[:num_new].isnan().all()
    assert torch.equal(actual[num_new:], expected[num_new:])


@pytest.mark.small(length=[1, 2, 8, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_broken", ["q", "k", "v"])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33])
def test_what_a_token_sees_as_nan_makes_it_nan(
    length: int, is_broken: str, dtype: torch.dtype
) -> None:
    """In a whole prompt, and in the token after it. Torch's causal attention makes it zero."""
    torch.manual_seed(0)
    layer, num_blocks = AttentionLayer(4, 2, 8, 0.3), -(-length // BLOCK_SIZE)
    tables = torch.arange(num_blocks, dtype=torch.int32)[None]
    for num_new in {1, length}:
        for broken in {length - num_new, length - 1}:
            q = torch.randn(num_new, 4, 8).to(dtype)
            kv_cache = torch.randn(2, num_blocks, 2, BLOCK_SIZE, 8).to(dtype)
            first = broken - (length - num_new)  # of the new tokens that see it
            if is_broken == "q":
                q[first] = torch.nan
            else:
                block, slot = divmod(broken, BLOCK_SIZE)
                kv_cache["kv".index(is_broken), block, :, slot] = torch.nan
            metadata = metadata_of([(num_new, length)], tables)
            attended = TorchAttention().attend(layer, q, KVCache(kv_cache), metadata)
            sees = torch.arange(num_new) == first if is_broken == "q" else slice(first, None)
            assert attended[sees].isnan().all()
