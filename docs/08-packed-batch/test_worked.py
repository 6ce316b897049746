"""The numbers of the course's chapter on the packed batch, against values worked by hand."""

import numpy as np
import pytest

from nanoserve.engine.batch import Batch, BatchLayout
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams

from . import worked

BY_HAND = {
    "positions": [7, 3, 4, 5, 6, 7, 0, 1, 2],
    "slot_mapping": [11, 35, 24, 25, 26, 27, 28, 29, 30],
    "cu_seqlens_q": [0, 1, 2, 6, 9],
    "cu_seqlens_k": [0, 8, 12, 20, 23],
    "context_lens": [8, 4, 8, 3],
    "output_rows": [0, 1, 8],  # c is a chunk in the middle of its prompt
}


@pytest.mark.parametrize(
    ("lengths", "places", "waste"),
    [
        ([1] * 256, 256, 0.0),
        ([1] * 31 + [512], 16_384, 0.96686),
        ([1] * 255 + [1793], 459_008, 0.99554),
        ([35, 100, 300, 512], 2048, 0.53760),
    ],
)
def test_padding(lengths: list[int], places: int, waste: float) -> None:
    assert worked.padded_places(lengths) == places
    assert worked.padding_waste(lengths) == pytest.approx(waste, abs=1e-5)
    assert lengths in worked.STEPS.values()


def test_the_padding_table_shows_them() -> None:
    assert "| four prompts | 947 | 2,048 | 53.8% |" in worked.padding_table()


def test_the_fields_of_the_example() -> None:
    assert worked.fields() == BY_HAND
    assert "| `output_rows` | `0 1 8` |" in worked.fields_table()
    assert "| *row of each token* | `a b c c c c d d d` |" in worked.fields_table()
    assert "| c | 10 | 4 | 4 | [1, 6, 9] |" in worked.rows_table()


def test_the_engine_packs_the_example_so() -> None:
    layout = BatchLayout(max_num_tokens=16, max_num_rows=4, max_blocks_per_row=3)
    batch = Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8))
    tables, plan = np.zeros((4, 3), dtype=np.int32), Plan()
    for slot, row in enumerate(worked.EXAMPLE):
        seq = Sequence(row.name, list(range(row.total)), SamplingParams(), max_model_len=64)
        seq.num_computed_tokens, seq.slot = row.computed, slot
        tables[slot, : len(row.table)] = row.table
        plan.num_new_tokens[seq] = row.new
    batch.pack(plan, tables, worked.EXAMPLE_BLOCK_SIZE, step=0)
    for name, integers in BY_HAND.items():
        assert getattr(batch, name)[: len(integers)].tolist() == integers, name
    assert batch.header.num_outputs == len(BY_HAND["output_rows"])


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


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 52_288), (32, 379_968), (256, 2_673_728)])
def test_a_step_copies_what_its_rows_need(num_rows: int, expected: int) -> None:
    layout = BatchLayout(max_num_tokens=2048, max_num_rows=256, max_blocks_per_row=2560)
    batch = Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8))
    assert batch.num_bytes_used(num_rows) == expected
    assert worked.step_bytes(2048, 256, 2560, num_rows) == expected
