"""Blocks, slots and waste, by hand and by the engine's block manager."""

import numpy as np
import pytest

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

from . import worked as paging


def test_half_the_memory_is_free_and_nothing_of_two_fits() -> None:
    """Ten reservations of 1 GB in a row, A to J; A, C, E, G and I are freed."""
    found = paging.holes([1] * 10, [0, 2, 4, 6, 8])
    assert sum(found) == 5 and max(found) == 1


def test_neighbouring_holes_are_one() -> None:
    assert paging.holes([1, 2, 3, 4], [0, 1, 3]) == [3, 4]
    assert paging.holes([1, 2, 3, 4], [1, 2, 3]) == [9]
    assert paging.holes([1, 2], []) == []


@pytest.mark.parametrize(("tokens", "blocks", "unused"), [(100, 7, 0.107), (300, 19, 0.013)])
def test_only_the_last_block_has_unused_slots(tokens: int, blocks: int, unused: float) -> None:
    assert paging.blocks_needed(tokens, 16) == BlockManager(1, 16).blocks_needed(tokens) == blocks
    assert paging.unused_in_blocks(tokens, 16) == pytest.approx(unused, abs=5e-4)


def test_full_blocks_waste_nothing() -> None:
    assert paging.unused_in_blocks(32, 16) == 0 and paging.unused_in_blocks(33, 1) == 0


def test_less_than_four_per_cent_needs_long_sequences() -> None:
    assert paging.mean_unused(16) == 7.5
    n = paging.tokens_for_waste(0.04, 16)
    assert n == pytest.approx(180) and 7.5 / (n + 7.5) == pytest.approx(0.04)


SLOTS = {35: 131, 0: 80, 15: 95, 16: 32, 63: 207}


@pytest.mark.parametrize("position", SLOTS)
def test_the_slot_of_a_position(position: int) -> None:
    assert paging.slot([5, 2, 8, 12], position, 16) == SLOTS[position]


def test_our_engine_packs_the_same_slots() -> None:
    seq = Sequence("a", list(range(64)), SamplingParams(), 100)
    seq.slot = 0
    batch = Batch(layout := BatchLayout(64, 1, 4), np.zeros(layout.num_bytes, dtype=np.uint8))
    plan = Plan(budget=0, rows=[Row(seq, 0, 64, 1, 1)])
    batch.pack(plan, np.array([[[5, 2, 8, 12]]], dtype=np.int32), block_size=16)
    slots = batch.slot_mapping[0, :64].tolist()
    assert {position: slots[position] for position in SLOTS} == SLOTS


def test_the_table_of_slots() -> None:
    table = paging.slot_table([5, 2, 8, 12], [35], 16).splitlines()
    assert table[2:] == ["| 35 | 2 | 3 | 8 | 131 |"]


def test_a_table_entry_is_small_beside_its_block() -> None:
    assert paging.table_share(16, 114_688) == pytest.approx(1 / 458_752)


def test_the_table_of_block_sizes() -> None:
    rows = paging.block_size_table([1, 16, 256], 300, 4096, 128, 2).splitlines()[2:]
    assert rows == [
        "| 1 | 0.0% | 4,096 | 256 B | 0.0 tokens |",
        "| 16 | 2.4% | 256 | 4,096 B | 7.5 tokens |",
        "| 256 | 29.8% | 16 | 65,536 B | 127.5 tokens |",
    ]
