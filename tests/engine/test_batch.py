"""The packed batch. W6 is the course's worked example of the slot mapping."""

import numpy as np
from packed_batches import make_batch, make_plan, make_sequence

from nanoserve.engine.batch import PENDING, Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.sampling_params import SamplingParams


def test_w6_slot_mapping() -> None:
    batch = make_batch()
    tables = np.zeros((4, 8), dtype=np.int32)
    tables[2, :4] = [5, 2, 8, 12]
    batch.pack(make_plan({make_sequence(64, 0, slot=2): 64}), tables[None], block_size=16)
    slots = {position: int(batch.slot_mapping[0, position]) for position in (0, 15, 16, 35, 63)}
    assert slots == {0: 80, 15: 95, 16: 32, 35: 131, 63: 207}


def test_a_mixed_batch() -> None:
    batch = make_batch()
    tables = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    decode = make_sequence(10, 9, slot=3)
    whole = make_sequence(6, 2, slot=0)
    chunk = make_sequence(20, 4, slot=1)
    batch.step = 8
    batch.pack(make_plan({decode: 1, whole: 4, chunk: 5}), tables[None], block_size=4)
    assert batch.header == BatchHeader(
        step=8,
        num_tokens=10,
        num_rows=3,
        num_decode_rows=1,
        num_pending=0,
        num_outputs=2,
        num_sampled=2,
        max_query_len=5,
        max_context_len=10,
        table_width=3,
    )
    assert batch.input_ids[:10].tolist() == [9, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert batch.positions[:10].tolist() == [9, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert batch.cu_seqlens_q[:4].tolist() == [0, 1, 5, 10]
    assert batch.context_lens[:3].tolist() == [10, 6, 9]
    assert batch.output_rows[:2].tolist() == [0, 4]  # the chunk is not through its prompt yet
    assert batch.output_slots[:2].tolist() == [3, 0]
    assert batch.row_slots[:3].tolist() == [3, 0, 1]
    assert batch.prompt_outputs(batch.header) == {}
    assert batch.block_tables(3, 3)[0].tolist() == [[25, 26, 27], [1, 2, 3], [9, 10, 11]]
    assert batch.slot_mapping[0, :2].tolist() == [27 * 4 + 1, 1 * 4 + 2]


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
    batch.step = 1
    batch.pack(make_plan({make_sequence(9, 8, slot=1): 1}), tables[None], block_size=2)
    used = batch.num_bytes_used(batch.header)
    assert used < batch.layout.num_bytes
    memory = np.zeros(batch.layout.num_bytes, dtype=np.uint8)
    memory[:used] = batch.memory[:used]
    twin = Batch(batch.layout, memory)
    assert twin.header == batch.header
    assert twin.block_tables(1, 5)[0].tolist() == [tables[1, :5].tolist()]


def test_a_preempted_sequence_computes_its_output_again_and_is_no_decode_row() -> None:
    batch = make_batch()
    seq = make_sequence(5, computed=0, slot=0)
    seq.token_ids += [7, 8]  # from before the preemption
    batch.pack(make_plan({seq: 7}), np.ones((1, 4, 8), dtype=np.int32), block_size=4)
    assert seq.output_token_ids and batch.header.num_decode_rows == 0


def test_block_tables_are_as_wide_as_the_longest_context() -> None:
    """However long sequences may become, a step copies no more than it reads."""
    batch = make_batch()
    tables = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    rows = {make_sequence(3, 2, slot=2): 1, make_sequence(6, 5, slot=0): 1}
    batch.pack(make_plan(rows), tables[None], block_size=4)
    header = batch.header
    assert header.table_width == 2
    assert batch.block_tables(2, 2)[0].tolist() == [[17, 18], [1, 2]]
    tables_begin = batch.layout.offsets()["block_tables"]
    assert batch.num_bytes_used(header) == tables_begin + 2 * 2 * 4
    assert set(batch.memory[batch.num_bytes_used(header) :]) == {255}  # the memory as it was


def test_a_token_that_only_the_device_knows_is_marked() -> None:
    """It takes part in everything else: its position, its slot, its row's output."""
    batch = make_batch()
    ahead, known = make_sequence(9, 9, slot=3), make_sequence(5, 4, slot=1)
    ahead.num_pending = 1
    tables = np.arange(1, 33, dtype=np.int32).reshape(4, 8)
    batch.pack(make_plan({ahead: 1, known: 1}), tables[None], block_size=4)
    header = batch.header
    assert (header.num_pending, header.num_sampled, header.max_context_len) == (1, 2, 10)
    assert batch.input_ids[:2].tolist() == [PENDING, 4]
    assert batch.positions[:2].tolist() == [9, 4]
    assert batch.slot_mapping[0, :2].tolist() == [27 * 4 + 1, 10 * 4]
    assert batch.row_slots[:2].tolist() == [3, 1]  # whose last token takes its place


def wants_prompt(length: int, computed: int, slot: int, head: str = "prompt_logprobs") -> Sequence:
    params = SamplingParams(prompt_logprobs=0)
    seq = Sequence("r", [10 * slot + i for i in range(length)], params, max_model_len=4096)
    seq.num_computed_tokens, seq.slot, seq.prompt_head = computed, slot, head
    return seq


def with_heads(*heads: str) -> Batch:
    layout = BatchLayout(max_num_tokens=64, max_num_rows=4, max_blocks_per_row=8, heads=heads)
    return Batch(layout, np.full(layout.num_bytes, 255, dtype=np.uint8))


def test_outputs_of_prompts_follow_those_that_are_sampled() -> None:
    """One row ends its prompt, one is a chunk in the middle of it, one wants nothing of it."""
    batch = with_heads("prompt_logprobs")
    plain = make_sequence(4, 3, slot=0)
    whole, chunk = wants_prompt(5, 2, slot=1), wants_prompt(9, 4, slot=2)
    batch.pack(
        make_plan({plain: 1, whole: 3, chunk: 2}), np.ones((1, 4, 8), np.int32), block_size=4
    )
    header = batch.header
    assert (header.num_sampled, header.num_outputs) == (2, 2 + 2 + 2)
    assert batch.output_rows[:6].tolist() == [0, 3, 1, 2, 4, 5]
    assert batch.output_slots[:6].tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.next_ids[2:6].tolist() == [13, 14, 25, 26]  # all are known: the prompt goes on
    assert batch.prompt_outputs(header) == {"prompt_logprobs": slice(2, 6)}


def test_each_head_gets_its_own_outputs_together() -> None:
    batch = with_heads("first", "idle", "second")
    rows = {
        wants_prompt(5, 0, slot=0, head="second"): 3,
        wants_prompt(5, 0, slot=1, head="first"): 2,
        wants_prompt(5, 1, slot=2, head="second"): 4,
    }
    batch.pack(make_plan(rows), np.ones((1, 4, 8), np.int32), block_size=4)
    assert batch.head_counts.tolist() == [2, 0, 6]
    assert batch.prompt_outputs(batch.header) == {"first": slice(1, 3), "second": slice(3, 9)}
    assert batch.output_rows[1:9].tolist() == [3, 4, 0, 1, 2, 5, 6, 7]
    assert batch.output_slots[1:9].tolist() == [1, 1, 0, 0, 0, 2, 2, 2]
    assert batch.next_ids[1:9].tolist() == [11, 12, 1, 2, 3, 22, 23, 24]


def test_a_prompt_of_one_token_has_no_outputs_but_the_sampled_one() -> None:
    """Nothing predicts its first token, and nothing known follows its last one."""
    batch = with_heads("prompt_logprobs")
    batch.pack(
        make_plan({wants_prompt(1, 0, slot=0): 1}), np.ones((1, 4, 8), np.int32), block_size=4
    )
    assert (batch.header.num_outputs, batch.prompt_outputs(batch.header)) == (1, {})


def test_single_tokens_come_first_and_all_others_keep_their_order() -> None:
    a, b, c, d = (make_sequence(20, start, slot) for slot, start in enumerate((0, 19, 4, 19)))
    plan = make_plan({a: 20, b: 1, c: 5, d: 1})
    plan.put_single_tokens_first()
    assert [row.seq for row in plan.rows] == [b, d, a, c]


def test_a_row_that_is_dropped_gives_its_tokens_back() -> None:
    a, b, c = (make_sequence(20, 0, slot) for slot in range(3))
    plan = Plan(budget=3, rows=[Row(a, 0, 20, 1, 1), Row(b, 0, 7, 0, 0)])
    plan.drop(c)
    assert (plan.budget, plan.num_tokens) == (3, 27)
    plan.drop(b)
    assert (plan.budget, plan.num_tokens, plan.sampled) == (10, 20, plan.rows)


def test_groups_of_layers_have_tables_of_their_own() -> None:
    layout = BatchLayout(64, 4, 8, num_groups=2)
    batch = Batch(layout, np.full(layout.num_bytes, 255, dtype=np.uint8))
    tables = np.arange(1, 65, dtype=np.int32).reshape(2, 4, 8)
    batch.pack(make_plan({make_sequence(10, 9, slot=3): 1}), tables, block_size=4)
    assert batch.block_tables(1, 3).tolist() == [[[25, 26, 27]], [[57, 58, 59]]]
    assert batch.slot_mapping[:, 0].tolist() == [27 * 4 + 1, 59 * 4 + 1]
    tables_begin = layout.offsets()["block_tables"]
    assert batch.num_bytes_used(batch.header) == tables_begin + 2 * 3 * 4
