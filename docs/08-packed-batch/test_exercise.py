"""Tests for the exercise of chapter 8, against the engine's own packing."""

import random

import numpy as np
import pytest

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.plan import Plan
from nanoserve.engine.plan import Row as PlannedRow
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

from .exercise import Row, pack

FIELDS = (
    "input_ids",
    "positions",
    "slot_mapping",
    "cu_seqlens_q",
    "context_lens",
    "output_rows",
)


def as_lists(packed: dict[str, np.ndarray]) -> dict[str, list[int]]:
    dtypes = {name: packed[name].dtype for name in FIELDS}
    assert dtypes == dict.fromkeys(FIELDS, np.int32), packed
    return {name: packed[name].tolist() for name in FIELDS}


def by_the_engine(rows: list[Row], block_size: int) -> dict[str, list[int]]:
    num_tokens = sum(row.num_new for row in rows)
    longest = max(len(row.block_table) for row in rows)
    layout = BatchLayout(num_tokens, len(rows), longest)
    batch = Batch(layout, np.full(layout.num_bytes, 255, dtype=np.uint8))
    tables, plan = np.zeros((1, len(rows), longest), dtype=np.int32), Plan(budget=0)
    for slot, row in enumerate(rows):
        seq = Sequence(str(slot), list(row.token_ids), SamplingParams(), max_model_len=10**6)
        seq.slot = slot
        tables[0, slot, : len(row.block_table)] = row.block_table
        is_last = int(row.num_computed + row.num_new == len(row.token_ids))
        plan.rows.append(PlannedRow(seq, row.num_computed, row.num_new, is_last, is_last))
    batch.pack(plan, tables, block_size)
    lengths = dict.fromkeys(FIELDS, num_tokens) | {
        "cu_seqlens_q": len(rows) + 1,
        "context_lens": len(rows),
        "output_rows": batch.header.num_sampled,
    }
    found = {name: getattr(batch, name) for name in FIELDS}
    found["slot_mapping"] = batch.slot_mapping[0]  # all layers are one group
    return {name: found[name][: lengths[name]].tolist() for name in FIELDS}


def random_row(rng: random.Random, block_size: int) -> Row:
    token_ids = [rng.randrange(1000) for _ in range(rng.randint(1, 40))]
    computed = rng.randrange(len(token_ids))
    left = len(token_ids) - computed
    blocks = rng.sample(range(1, 1000), -(-len(token_ids) // block_size))
    return Row(token_ids, computed, rng.choice([1, left, rng.randint(1, left)]), blocks)


def test_position_35_is_slot_131() -> None:
    packed = as_lists(pack([Row(list(range(64)), 0, 64, [5, 2, 8, 12])], block_size=16))
    found = [packed["slot_mapping"][i] for i in (0, 15, 16, 35, 63)]
    assert found == [80, 95, 32, 131, 207], "pack([Row(list(range(64)), 0, 64, [5, 2, 8, 12])], 16)"


def test_a_chunk_in_the_middle_of_its_prompt_has_no_output_row() -> None:
    chunk = Row(list(range(10)), num_computed=4, num_new=4, block_table=[1, 6, 9])
    found = as_lists(pack([chunk], block_size=4))["output_rows"]
    assert found == [], f"pack([{chunk}], block_size=4)"


def test_its_last_chunk_has_one() -> None:
    chunk = Row(list(range(10)), num_computed=8, num_new=2, block_table=[1, 6, 9])
    decode = Row([3, 4], num_computed=1, num_new=1, block_table=[2])
    packed = as_lists(pack([decode, chunk], block_size=4))
    case = f"pack({[decode, chunk]}, block_size=4)"
    assert packed["output_rows"] == [0, 2], case
    assert packed["cu_seqlens_q"] == [0, 1, 3], case
    assert packed["input_ids"] == [4, 8, 9], case
    assert packed["positions"] == [1, 8, 9], case


@pytest.mark.parametrize("seed", range(100))
def test_any_step_is_packed_as_the_engine_does(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 3, 4, 16])
    rows = [random_row(rng, block_size) for _ in range(rng.randint(1, 8))]
    expected, case = by_the_engine(rows, block_size), f"pack({rows}, {block_size})"
    assert as_lists(pack(rows, block_size)) == expected, case
