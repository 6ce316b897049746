"""The packed batch. W6 is the course's worked example of the slot mapping."""

import numpy as np
from packed_batches import make_batch, make_sequence

from nanoserve.engine.batch import Batch, BatchLayout
from nanoserve.engine.plan import Plan


def test_w6_slot_mapping() -> None:
    batch = make_batch()
    tables = np.zeros((4, 8), dtype=np.int32)
    tables[2, :4] = [5, 2, 8, 12]
    batch.pack(Plan({make_sequence(64, 0, slot=2): 64}), tables, block_size=16, step=0)
    slots = {position: int(batch.slot_mapping[position]) for position in (0, 15, 16, 35, 63)}
    assert slots == {0: 80, 15: 95, 16: 32, 35: 131, 63: 207}


def test_a_mixed_batch() -> None:
    batch = make_batch()
    tables = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    decode = make_sequence(10, 9, slot=3)
    whole = make_sequence(6, 2, slot=0)
    chunk = make_sequence(20, 4, slot=1)
    batch.pack(Plan({decode: 1, whole: 4, chunk: 5}), tables, block_size=4, step=8)
    assert batch.header_dict() == {
        "step": 8,
        "num_tokens": 10,
        "num_rows": 3,
        "num_decode_rows": 1,
        "num_output_rows": 2,
        "num_sampled_rows": 2,
        "max_query_len": 5,
        "max_context_len": 10,
    }
    assert batch.input_ids[:10].tolist() == [9, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert batch.positions[:10].tolist() == [9, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert batch.cu_seqlens_q[:4].tolist() == [0, 1, 5, 10]
    assert batch.cu_seqlens_k[:4].tolist() == [0, 10, 16, 25]
    assert batch.context_lens[:3].tolist() == [10, 6, 9]
    assert batch.output_rows[:2].tolist() == [0, 4]  # the chunk is not through its prompt yet
    assert batch.slots[:2].tolist() == [3, 0]
    assert batch.block_tables[:3, :3].tolist() == [[25, 26, 27], [1, 2, 3], [9, 10, 11]]
    assert batch.slot_mapping[:2].tolist() == [27 * 4 + 1, 1 * 4 + 2]


def test_fields_are_aligned_and_do_not_overlap() -> None:
    layout = BatchLayout(max_num_tokens=33, max_num_rows=5, max_blocks_per_row=3)
    offsets, fields = layout.offsets(), layout.fields()
    assert all(offset % 16 == 0 for offset in offsets.values())
    assert list(fields)[-1] == "block_tables"
    starts = [*offsets.values()]
    for (name, capacity), start, following in zip(fields.items(), starts, starts[1:], strict=False):
        assert start + 4 * capacity <= following, name


def test_a_copy_of_the_bytes_in_use_is_the_whole_batch() -> None:
    batch = make_batch()
    tables = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    batch.pack(Plan({make_sequence(9, 8, slot=1): 1}), tables, block_size=2, step=1)
    copied = batch.memory[: batch.num_bytes_used(1)]
    assert batch.num_bytes_used(1) < batch.layout.num_bytes
    memory = np.zeros(batch.layout.num_bytes, dtype=np.uint8)
    memory[: len(copied)] = copied
    twin = Batch(batch.layout, memory)
    assert twin.header_dict() == batch.header_dict()
    assert twin.block_tables[0, :5].tolist() == tables[1, :5].tolist()


def test_a_preempted_sequence_computes_its_output_again_and_is_no_decode_row() -> None:
    batch = make_batch()
    seq = make_sequence(5, computed=0, slot=0)
    seq.token_ids += [7, 8]  # from before the preemption
    batch.pack(Plan({seq: 7}), np.ones((4, 8), dtype=np.int32), block_size=4, step=0)
    assert seq.output_token_ids and batch.header.num_decode_rows == 0
