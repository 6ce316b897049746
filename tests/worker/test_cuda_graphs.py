"""Which graphs are captured, which batches they cover, and what fills them up."""

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from packed_batches import make_batch, make_plan, make_sequence
from toy_computation import toy_computation

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_graphs import SizedGraphs, graph_sizes
from nanoserve.worker.draft_program import DraftProgram
from nanoserve.worker.dummy_rows import append_dummy_rows, pack_dummy_step
from nanoserve.worker.graph_programs import DecodeProgram, GraphProgram


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, *range(9, 16), *range(17, 32), 256, 257, 1000])
def test_sizes_ascend_to_exactly_the_largest_batch(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs


def test_there_are_not_too_many_sizes_and_none_is_far_above_the_batch() -> None:
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert len(graph_sizes(256)) == 20 and len(graph_sizes(1024)) == 32
    graphs = SizedGraphs(graph_sizes(1024))
    for rows in range(1, 1025):
        size = graphs.size_for(rows)
        assert rows <= size <= max(2 * rows, rows + 16, rows * 1.25), (rows, size)


def make_program(sizes: list[int], query_len: int = 1) -> GraphProgram:
    cuda, layout = FakeCuda(), BatchLayout(64, sizes[-1], 8)
    computation = toy_computation(lambda *step: torch.zeros(1), torch.zeros(4, dtype=torch.int32))
    parts = cuda, CudaBuffers(cuda, layout), computation, sizes
    return DecodeProgram(*parts, False) if query_len == 1 else DraftProgram(*parts, query_len)


def packed(num_new_tokens: list[int]) -> Batch:
    """Rows of so many tokens, in contexts of nine."""
    batch = make_batch(rows=max(4, len(num_new_tokens)))
    rows = {make_sequence(9, 9 - n, slot): n for slot, n in enumerate(num_new_tokens)}
    tables = np.ones((1, len(rows), 8), np.int32)
    batch.pack(make_plan(rows), tables, block_size=4)
    return batch


@pytest.mark.parametrize("max_num_seqs", [*range(9, 16), *range(17, 32)])
def test_every_decode_batch_has_its_graph(max_num_seqs: int) -> None:
    """nano-vllm's sizes ended at the last multiple of 16 below the largest batch."""
    program = make_program(graph_sizes(max_num_seqs))
    for rows in range(1, max_num_seqs + 2):
        batch = packed([1] * rows)
        assert program.covers(batch, batch.header) is (rows <= max_num_seqs)
        if rows <= max_num_seqs:
            assert program.graphs.size_for(rows) in program.graphs.sizes


@pytest.mark.parametrize(
    ("num_new_tokens", "query_len", "covered"),
    [
        ([1], 1, True),
        ([1, 1, 1], 1, True),
        ([1, 1, 2], 1, False),
        ([5], 1, False),
        ([3, 3], 3, True),  # a step with two draft tokens per sequence
        ([1, 3], 3, True),  # of which one may have none
        ([1, 2, 2], 3, True),
        ([1, 3, 5], 3, False),  # a chunk of a prompt
        ([1, 1, 1], 3, False),  # a decode step
        ([3, 3, 3, 3, 3], 3, False),  # more rows than the largest graph
    ],
)
def test_a_step_is_covered_if_its_rows_can_have_the_captured_length(
    num_new_tokens: list[int], query_len: int, covered: bool
) -> None:
    batch = packed(num_new_tokens)
    assert make_program([1, 2, 4], query_len).covers(batch, batch.header) is covered


def test_padding_is_rows_of_one_token_in_the_dummy_block() -> None:
    batch = make_batch()  # of 0xFF bytes: what is not written shows
    tables = np.arange(1, 33, dtype=np.int32).reshape(1, 4, 8)
    rows = {make_sequence(10, 9, slot=3): 1, make_sequence(5, 4, slot=1): 1}
    batch.step = 8
    batch.pack(make_plan(rows), tables, block_size=4)
    before = batch.header
    padded = append_dummy_rows(batch, before, np.ones(2, dtype=np.int32), block_size=4)

    assert batch.header == before
    assert padded == before._replace(num_tokens=4, num_rows=4, num_decode_rows=4)
    assert batch.input_ids[:4].tolist() == [9, 4, 0, 0]
    assert batch.positions[:4].tolist() == [9, 4, 0, 0]
    assert batch.slot_mapping[0, :4].tolist() == [27 * 4 + 1, 10 * 4, 0, 0]
    assert batch.context_lens[:4].tolist() == [10, 5, 1, 1]
    assert batch.cu_seqlens_q[:5].tolist() == [0, 1, 2, 3, 4]
    assert batch.row_slots[:4].tolist() == [3, 1, 0, 0]
    assert before.table_width == 3  # of ten tokens; the tables are no wider
    assert batch.block_tables(4, 3).tolist() == [[[25, 26, 27], [9, 10, 11], [0] * 3, [0] * 3]]
    assert batch.num_bytes_used(padded) == batch.num_bytes_used(before) + 2 * 3 * 4


def test_the_tables_of_every_group_are_padded() -> None:
    """They lie one behind the other: those of the second move when the first has more rows."""
    layout = BatchLayout(64, 4, 8, num_groups=2)
    batch = Batch(layout, np.full(layout.num_bytes, 255, dtype=np.uint8))
    tables = np.arange(1, 65, dtype=np.int32).reshape(2, 4, 8)
    rows = {make_sequence(10, 9, slot=3): 1, make_sequence(5, 4, slot=1): 1}
    batch.pack(make_plan(rows), tables, block_size=4)
    append_dummy_rows(batch, batch.header, np.ones(2, dtype=np.int32), block_size=4)
    for group, padded in enumerate(batch.block_tables(4, 3).tolist()):
        assert padded == [*tables[group, [3, 1], :3].tolist(), [0] * 3, [0] * 3]
        last = 4 * tables[group, 3, 2] + 1, 4 * tables[group, 1, 1]
        assert batch.slot_mapping[group, :4].tolist() == [*last, 0, 0]


def test_what_is_pending_stays_so_beside_padding() -> None:
    """Dummy rows have a token that is known, or they would be given somebody's last one."""
    batch = make_batch()
    seq = make_sequence(6, 6, slot=2)
    seq.num_pending = 1
    batch.pack(make_plan({seq: 1}), np.ones((1, 4, 8), np.int32), block_size=4)
    padded = append_dummy_rows(batch, batch.header, np.ones(3, dtype=np.int32), block_size=4)
    assert padded.num_pending == 1 and batch.input_ids[:4].tolist() == [-1, 0, 0, 0]


def test_ranks_that_share_a_batch_pad_it_alike() -> None:
    """Each does it when it comes to the step, from the header that counts the real rows."""
    batch = make_batch()
    batch.pack(make_plan({make_sequence(10, 9, slot=3): 1}), np.ones((1, 4, 8), np.int32), 4)
    padded = append_dummy_rows(batch, batch.header, np.ones(3, dtype=np.int32), block_size=4)
    memory = batch.memory.copy()
    again = append_dummy_rows(batch, batch.header, np.ones(3, dtype=np.int32), block_size=4)
    assert again == padded and (batch.memory == memory).all()


def test_a_full_graph_needs_no_padding() -> None:
    batch = make_batch()
    batch.pack(make_plan({make_sequence(5, 4, slot=0): 1}), np.ones((1, 4, 8), np.int32), 4)
    memory = batch.memory.copy()
    padded = append_dummy_rows(batch, batch.header, np.ones(0, dtype=np.int32), 4)
    assert padded == batch.header and (batch.memory == memory).all()


def test_dummy_rows_of_several_tokens_make_a_batch_of_their_own() -> None:
    batch, empty = make_batch(), BatchHeader(table_width=2)  # blocks of the longest
    made = append_dummy_rows(batch, empty, np.array([1, 6, 3], dtype=np.int32), block_size=4)
    assert made == BatchHeader(
        num_tokens=10,
        num_rows=3,
        num_decode_rows=1,
        max_query_len=6,
        max_context_len=6,
        table_width=2,
    )
    assert batch.input_ids[:10].tolist() == [0] * 10
    assert batch.positions[:10].tolist() == [0, 0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert batch.slot_mapping[0, :10].tolist() == [0, 0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.cu_seqlens_q[:4].tolist() == [0, 1, 7, 10]
    assert batch.context_lens[:3].tolist() == [1, 6, 3]
    assert batch.block_tables(3, 2).tolist() == [[[0, 0]] * 3]


def test_the_largest_graph_is_captured_first_and_each_replays_its_own() -> None:
    cuda, graphs = FakeCuda(), SizedGraphs([1, 2, 4])
    source = torch.arange(4.0)
    graphs.capture(cuda, lambda size: source[:size] + 1)
    assert cuda.events == ["capture 4", "capture 2", "capture 1"]
    source += 10
    assert graphs.replay(2).tolist() == [11, 12] and cuda.events[-1] == "replay 2"
    assert graphs.replay(4).tolist() == [11, 12, 13, 14]


def test_a_step_of_dummies_counts_itself() -> None:
    """Its header is in the batch, as every rank reads it, with the outputs that are sampled."""
    batch = make_batch()
    lengths = np.array([1, 1, 4], dtype=np.int32)
    header = pack_dummy_step(batch, lengths, 4, num_sampled=4, max_context_len=30)
    assert batch.header == header == BatchHeader(
        num_tokens=6, num_rows=3, num_decode_rows=2, max_query_len=4, max_context_len=30,
        table_width=1, num_outputs=4, num_sampled=4,
    )  # fmt: skip
    assert batch.output_rows[:4].tolist() == [2, 3, 4, 5]
    assert batch.output_slots[:4].tolist() == [0, 1, 2, 0]  # of rows that there are
    assert batch.slot_mapping[0, :6].tolist() == [0, 0, 0, 1, 2, 3]
