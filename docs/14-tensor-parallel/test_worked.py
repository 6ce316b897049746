"""Tests of the worked examples on tensor parallelism, against values computed by hand."""

import pytest

from . import worked as tp


def test_two_ranks_make_the_product_of_one() -> None:
    """W1 x = [1, 2, 3, -1]; its relu [1, 2, 3, 0]; W2 of that is [1 + 4, 2 + 3]."""
    assert tp.product(tp.W1, tp.X) == [1, 2, 3, -1]
    assert tp.two_layers(tp.X) == [5, 5]
    assert tp.rank_product(0, tp.X) == {"hidden": [1, 2], "relu": [1, 2], "partial": [5, 2]}
    assert tp.rank_product(1, tp.X) == {"hidden": [3, -1], "relu": [3, 0], "partial": [0, 3]}
    assert "| sum | | | **[5, 5]** |" in tp.product_table()


def test_an_activation_must_not_meet_a_summand() -> None:
    assert (tp.relu_of_sum(3, -4), tp.sum_of_relus(3, -4)) == (0, 3)


def test_parameters_are_those_of_llama_2() -> None:
    """7B: 202,383,360 in a layer, 6,738,415,616 in all; 70B: 68,976,648,192."""
    assert tp.parameters(0, 4096, 11_008, 1, 32, 32, 128) - 4096 == 202_383_360
    assert tp.parameters(32_000, 4096, 11_008, 32, 32, 32, 128) == 6_738_415_616
    assert tp.llama_2_70b() == 68_976_648_192


def test_the_kv_of_70b_is_divided_until_a_rank_has_one_head() -> None:
    """4,096 tokens take 1,342,177,280 bytes on one rank; 32 users of them 42.9 GB."""
    assert tp.kv_bytes(4096, 80, 8, 128) == 1_342_177_280
    assert tp.kv_bytes(32 * 4096, 80, 8, 128) == 42_949_672_960
    assert tp.kv_bytes(4096, 80, 8, 128, ranks=8) == 167_772_160
    assert tp.kv_bytes(4096, 80, 8, 128, ranks=16) == 167_772_160
    first, *_, last = tp.memory_table(32, 4096).splitlines()[2:]
    assert first == "| 1 | 138.0 | 42.9 | 180.9 | no |"
    assert last == "| 8 | 17.2 | 5.4 | 22.6 | yes |"


def test_two_all_reduces_a_layer_and_one_for_the_embedding() -> None:
    assert tp.all_reduces(80) == 161
    assert tp.message_bytes(8192) == 16_384
    assert tp.message_bytes(8192, tokens=2048) == 33_554_432


@pytest.mark.parametrize(("ranks", "expected"), [(1, 0), (2, 16_384), (4, 24_576), (8, 28_672)])
def test_a_ring_sends_nearly_twice_the_message(ranks: int, expected: float) -> None:
    assert tp.ring_bytes(16_384, ranks) == expected


def test_the_bytes_of_a_step() -> None:
    """161 x 24,576 for a token on four ranks; 2,048 times that for a full prefill step."""
    assert tp.step_bytes(8192, 80, tokens=1, ranks=4) == 3_956_736
    assert tp.step_bytes(8192, 80, tokens=2048, ranks=4) == 8_103_395_328
    assert tp.gather_bytes(1, 32_000, 4) == 48_000
    assert tp.gather_bytes(256, 151_936, 4) == 58_343_424


def test_heads_are_dealt_out_whole_and_kv_heads_are_shared() -> None:
    assert tp.heads_of(1, 2, 8, 2) == (range(4, 8), range(1, 2))
    shared = [tp.heads_of(rank, 4, 8, 2) for rank in range(4)]
    assert [kv for _, kv in shared] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert [*shared[3][0]] == [6, 7]
    assert "| 2 | 4, 5 | 1 |" in tp.heads_table(4, 8, 2)


def test_the_vocabulary_is_padded_to_a_multiple_of_the_ranks() -> None:
    """Ten tokens on four ranks: 3, 3, 3 and 1; the last rank has two rows of padding."""
    parts = [tp.vocabulary_part(rank, 4, 10) for rank in range(4)]
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    table = tp.embedding_table(10, 4, token_id=7)
    assert "| 2 | 6 to 8 | 0 | the row of token 7 |" in table
    assert "| 3 | 9 to 9 | 2 | zeros |" in table
    assert [len(tp.vocabulary_part(rank, 4, 5)) for rank in range(4)] == [2, 2, 1, 0]


def test_latency_eats_the_gain_of_a_small_model() -> None:
    """1,192,099,840 bytes at 3.35 TB/s are 0.356 ms; 57 all-reduces of 10 us are 0.57 ms."""
    alone = tp.decode_ms(2 * 596_049_920, 28, 1, 3.35e12, 10)
    on_two = tp.decode_ms(2 * 596_049_920, 28, 2, 3.35e12, 10)
    assert alone == pytest.approx(0.3559, abs=1e-4)
    assert on_two == pytest.approx(0.1779 + 0.57, abs=1e-4)
    *_, large = tp.decode_table(3.35e12, 10).splitlines()
    # 41.18 ms; on four ranks 10.295 + 1.61; on eight 5.1475 + 1.61.
    times = ["41.18 ms (1.0x)", "22.20 ms (1.9x)", "11.91 ms (3.5x)", "6.76 ms (6.1x)"]
    assert large == f"| LLaMA-2-70B | {' | '.join(times)} |"


def test_all_reduce_and_all_gather() -> None:
    assert tp.all_reduce([[1], [2], [3], [4]]) == [[10]] * 4
    assert tp.all_gather([[1], [2], [3], [4]]) == [[1, 2, 3, 4]] * 4


def test_a_silent_worker_is_given_up_before_a_step_that_does_not_end() -> None:
    assert tp.default("worker_timeout_seconds") == 8
    assert tp.default("distributed_timeout_seconds") == 300
