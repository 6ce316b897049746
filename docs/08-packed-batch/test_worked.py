"""The numbers of the chapter on the packed batch, against values worked by hand."""

import numpy as np
import pytest

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

from . import worked

BY_HAND = {
    "positions": [7, 3, 4, 5, 6, 7, 0, 1, 2],
    "slot_mapping": [11, 35, 24, 25, 26, 27, 28, 29, 30],
    "cu_seqlens_q": [0, 1, 2, 6, 9],
    "context_lens": [8, 4, 8, 3],
    "output_rows": [0, 1, 8],  # c is a chunk in the middle of its prompt
}


@pytest.mark.parametrize(
    ("lengths", "elements", "waste"),
    [
        ([1] * 256, 256, 0.0),
        ([1] * 31 + [512], 16_384, 0.96686),
        ([1] * 255 + [1793], 459_008, 0.99554),
        ([35, 100, 300, 512], 2048, 0.53760),
    ],
)
def test_padding(lengths: list[int], elements: int, waste: float) -> None:
    assert worked.padded_places(lengths) == elements
    assert worked.padding_waste(lengths) == pytest.approx(waste, abs=1e-5)
    assert lengths in worked.STEPS.values()


def test_the_padding_table_shows_them() -> None:
    assert "| four prompts | 947 | 2,048 | 53.8% |" in worked.padding_table()


def test_the_fields_of_the_example() -> None:
    assert worked.fields() == BY_HAND
    tokens = worked.token_fields_table().splitlines()
    assert tokens[2] == "| *row* | a | b | c | c | c | c | d | d | d |"
    assert tokens[3].startswith("| `input_ids` | `a7` | `b3` | `c4` |")
    assert tokens[5] == "| `slot_mapping` | 11 | 35 | 24 | 25 | 26 | 27 | 28 | 29 | 30 |"
    rows = worked.row_fields_table().splitlines()
    assert rows[0] == "| row | a | b | c | d | (end) |"
    assert rows[2:] == [
        "| `cu_seqlens_q` | 0 | 1 | 2 | 6 | 9 |",
        "| `context_lens` | 8 | 4 | 8 | 3 |  |",
        "| `block_tables` | 5, 2 | 8 | 1, 6 | 7 |  |",
    ]
    assert "| c | 10 | 4 | 4 | [1, 6, 9] |" in worked.rows_table()


def test_the_engine_packs_the_example_so() -> None:
    layout = BatchLayout(max_num_tokens=16, max_num_rows=4, max_blocks_per_row=3)
    batch = Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8))
    tables, plan = np.zeros((1, 4, 3), dtype=np.int32), Plan(budget=0)
    for slot, row in enumerate(worked.EXAMPLE):
        seq = Sequence(row.name, list(range(row.total)), SamplingParams(), max_model_len=64)
        seq.slot = slot
        tables[0, slot, : len(row.table)] = row.table
        num_sampled = int(row.computed + row.new == row.total)
        plan.rows.append(Row(seq, row.computed, row.new, num_sampled, num_sampled))
    batch.pack(plan, tables, worked.EXAMPLE_BLOCK_SIZE)
    for name, integers in BY_HAND.items():
        found = batch.slot_mapping[0] if name == "slot_mapping" else getattr(batch, name)
        assert found[: len(integers)].tolist() == integers, name
    assert batch.header.num_outputs == batch.header.num_sampled == len(BY_HAND["output_rows"])
    # As wide as the longest context: 8 tokens are two blocks, though c has three.
    assert batch.block_tables(4, batch.header.table_width)[0].tolist() == [
        [5, 2],
        [8, 0],
        [1, 6],
        [7, 0],
    ]


def test_bytes_of_logits() -> None:
    assert worked.logits_bytes(2048, vocab_size=151_936, dtype_bytes=2) == 622_329_856
    assert worked.logits_bytes(32, vocab_size=151_936, dtype_bytes=2) == 9_723_904


def test_the_lm_head_of_qwen3_0_6b_is_a_third_of_its_layers() -> None:
    share = worked.lm_head_share(
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab_size=151_936,
    )
    assert share == pytest.approx(155_582_464 / 440_401_920)


@pytest.mark.parametrize(
    ("num_rows", "width", "expected"),
    [(0, 0, 52_304), (32, 63, 60_368), (256, 63, 116_816), (32, 2560, 379_984)],
)
def test_a_step_copies_what_its_rows_need(num_rows: int, width: int, expected: int) -> None:
    layout = BatchLayout(2048, 256, max_blocks_per_row=2560, heads=("prompt_logprobs",))
    batch = Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8))
    header = BatchHeader(num_rows=num_rows, table_width=width)
    assert batch.num_bytes_used(header) == expected
    assert worked.step_bytes(2048, 256, num_rows, width) == expected
