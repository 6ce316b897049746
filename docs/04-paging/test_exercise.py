"""Test of the exercise of chapter 4, with our block manager and our torch attention."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanoserve.attention.interface import AttentionLayer, AttentionMetadata
from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.torch import TorchAttention
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

from .exercise import gather, grow, slot_mapping, store

HEADS, DIM = 2, 4


def test_the_slots_of_the_chapter() -> None:
    positions = np.array([35, 0, 15, 16, 63])
    slots = slot_mapping([5, 2, 8, 12], positions, 16)
    case = f"slot_mapping([5, 2, 8, 12], np.array({positions.tolist()}), 16)"
    assert slots.tolist() == [131, 80, 95, 32, 207], case
    slots = slot_mapping([5, 2], np.array([], dtype=int), 16)
    assert slots.tolist() == [], "slot_mapping([5, 2], np.array([], dtype=int), 16)"


def test_a_table_grows_when_a_token_needs_it_and_not_before() -> None:
    table, free = [], [3, 1, 2]
    lens = []
    for num_tokens in range(1, 10):
        case = f"grow({table}, {free}, {num_tokens}, block_size=4)"
        assert grow(table, free, num_tokens, block_size=4), case
        lens.append(len(table))
    case = "from table [] and free [3, 1, 2], grown to 1, 2, ... 9 tokens, block_size=4"
    assert lens == [1, 1, 1, 1, 2, 2, 2, 2, 3], case
    assert (table, free) == ([3, 1, 2], []), case


def test_growing_is_all_or_nothing() -> None:
    table, free = [9], [1, 2]
    assert not grow(table, free, 13, block_size=4), "grow([9], [1, 2], 13, block_size=4)"
    assert (table, free) == ([9], [1, 2]), "grow([9], [1, 2], 13, block_size=4) must change nothing"
    assert grow(table, free, 12, block_size=4), "grow([9], [1, 2], 12, block_size=4)"
    assert (table, free) == ([9, 1, 2], []), "grow([9], [1, 2], 12, block_size=4)"


def test_a_table_with_room_stays_as_it_is() -> None:
    table, free = [4, 5, 6], [1]
    assert grow(table, free, 3, block_size=4), "grow([4, 5, 6], [1], 3, block_size=4)"
    assert (table, free) == ([4, 5, 6], [1]), "grow([4, 5, 6], [1], 3, block_size=4)"


def test_tables_are_those_of_our_block_manager() -> None:
    rng = random.Random(0)
    failures = 0
    for _ in range(100):
        num_blocks, block_size = rng.randint(1, 30), rng.randint(1, 6)
        manager = BlockManager(num_blocks, block_size, enable_prefix_caching=False)
        free = list(range(1, num_blocks + 1))
        sequences = [Sequence(str(i), [7], SamplingParams(), 1000) for i in range(3)]
        tables: list[list[int]] = [[], [], []]
        for _ in range(20):
            i, num_tokens = rng.randrange(3), rng.randint(1, 40)
            case = f"grow({tables[i]}, {free}, {num_tokens}, {block_size})"
            grew = grow(tables[i], free, num_tokens, block_size)
            assert grew == manager.allocate(sequences[i], num_tokens), case
            assert tables[i] == sequences[i].block_table, case
            failures += not grew
    assert failures > 100, f"{failures} of 2,000 random calls found too few blocks"


def write_interleaved(
    lens: list[int], num_blocks: int, block_size: int
) -> tuple[np.ndarray, list[list[int]], list[np.ndarray]]:
    """Store sequences that grow by a few tokens in turn; slots that are not written stay NaN."""
    rng = np.random.default_rng(len(lens))
    cache = np.full((num_blocks + 1, HEADS, block_size, DIM), np.nan)
    free = rng.permutation(np.arange(1, num_blocks + 1)).tolist()
    tables: list[list[int]] = [[] for _ in lens]
    contents = [rng.standard_normal((n, HEADS, DIM)) for n in lens]
    done = [0] * len(lens)
    while done != lens:
        for i, n in enumerate(lens):
            end = min(n, done[i] + int(rng.integers(1, 4)))
            case = f"grow({tables[i]}, {free}, {end}, {block_size})"
            assert grow(tables[i], free, end, block_size), case
            positions = np.arange(done[i], end)
            store(cache, slot_mapping(tables[i], positions, block_size), contents[i][done[i] : end])
            done[i] = end
    return cache, tables, contents


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("lens", [[1], [16], [5, 17, 1], [9, 9, 9, 2]])
def test_what_was_stored_is_gathered(lens: list[int], block_size: int) -> None:
    cache, tables, contents = write_interleaved(lens, 40, block_size)
    made = f"cache, tables, contents = write_interleaved({lens}, 40, {block_size})"
    for table, content in zip(tables, contents, strict=True):
        for more, n in (([], len(content)), ([10**6], len(content)), ([], 1)):
            found, expected = gather(cache, table + more, n), content.transpose(1, 0, 2)[:, :n]
            case = f"{made}; gather(cache, {table + more}, {n})"
            np.testing.assert_array_equal(found, expected, err_msg=case)
    assert np.isnan(cache[0]).all(), f"{made}: something is in the dummy block"
    assert np.isfinite(cache).sum() == sum(lens) * HEADS * DIM, f"{made}: number of values"


def test_our_attention_reads_your_cache() -> None:
    lens, block_size, num_heads = [9, 1, 30], 4, 4
    k_cache, tables, _ = write_interleaved(lens, 20, block_size)
    v_cache = np.nan_to_num(k_cache[..., ::-1])
    kv_cache = torch.from_numpy(np.stack([np.nan_to_num(k_cache), v_cache]))
    longest = max(map(len, tables))
    padded = torch.tensor([table + [0] * (longest - len(table)) for table in tables])
    rows = torch.arange(len(lens) + 1, dtype=torch.int32)
    contexts = torch.tensor(lens, dtype=torch.int32)
    metadata = AttentionMetadata(
        contexts - 1,
        torch.zeros(0),
        rows,
        contexts,
        padded.int(),
        num_decode_rows=len(lens),
        max_query_len=1,
        max_context_len=max(lens),
    )
    layer = AttentionLayer(num_heads, HEADS, DIM, scale=DIM**-0.5)
    q = torch.randn(len(lens), num_heads, DIM, dtype=torch.float64)
    found = TorchAttention().attend(layer, q, KVCache(kv_cache), metadata)
    for i, n in enumerate(lens):
        k, v = (torch.from_numpy(gather(x.numpy(), tables[i], n)) for x in kv_cache)
        expected = F.scaled_dot_product_attention(q[i][:, None], k, v, enable_gqa=True)[:, 0]
        case = f"write_interleaved({lens}, 20, {block_size}), sequence {i}, table {tables[i]}"
        torch.testing.assert_close(
            found[i], expected, atol=1e-5, rtol=1e-5, msg=lambda told, at=case: f"{told}\n{at}"
        )
