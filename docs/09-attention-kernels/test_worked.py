"""The numbers of the chapter on attention kernels, against values worked by hand."""

from math import exp

import pytest

from . import worked


def test_scores_of_a_long_prompt_are_far_larger_than_inputs_and_output() -> None:
    assert worked.score_bytes(tokens=2048, heads=16, dtype_bytes=4) == 268_435_456
    assert worked.qkvo_bytes(2048, heads=16, kv_heads=8, head_dim=128, dtype_bytes=2) == 25_165_824


def test_kv_of_a_decode_step() -> None:
    seen = worked.kv_bytes(rows=32, context=2048, kv_heads=8, head_dim=128, dtype_bytes=2)
    assert seen == 268_435_456


def test_in_16_bits_the_intensity_of_decode_is_the_size_of_the_group() -> None:
    assert [worked.decode_intensity(group, dtype_bytes=2) for group in (1, 2, 8)] == [1, 2, 8]


def test_online_softmax() -> None:
    first, last = worked.online_states()
    assert first == pytest.approx((3, exp(-2) + 1, 10 * exp(-2) + 20))
    assert first == pytest.approx((3, 1.135335, 21.353353), abs=1e-6)
    assert last == pytest.approx((5, 1.203438, 44.383470), abs=1e-4)
    weights = [exp(-4), exp(-2), exp(-3), 1]  # of the scores 1, 3, 2 and 5
    expected = (10 * exp(-4) + 20 * exp(-2) + 30 * exp(-3) + 40) / sum(weights)
    assert last.acc / last.total == pytest.approx(expected) == pytest.approx(36.8806, abs=1e-4)
    assert worked.exact() == pytest.approx(expected)
    row = "| 1 | 2, 5 | 30, 40 | 0.1353 | 5 | 1.2034 | 44.3835 | 36.8806 |"
    assert row in worked.online_table()


def test_merge_by_log_sum_exp() -> None:
    first, second = worked.parts()
    assert first == pytest.approx((18.80797, 3.126928), abs=1e-5)
    assert second == pytest.approx((39.52574, 5.048587), abs=1e-5)
    assert worked.merge([first, second]) == pytest.approx(36.8806, abs=1e-4)
    assert worked.plain_mean([first, second]) == pytest.approx(29.16686, abs=1e-4)
    assert "| 0 | 18.8080 | 3.1269 | 0.1464 |" in worked.parts_table()


def test_tiles_of_rows() -> None:
    """Rows of 5, 3 and 9 tokens need 2, 1 and 3 tiles of 4; program 3 has nothing to do."""
    assert worked.tile_starts([5, 3, 9], block_q=4) == [0, 2, 4, 7]
    table = worked.tiles_table([5, 3, 9], block_q=4)
    assert "| 3 | 1 | none: it returns at once |" in table and "| 6 | 2 | 8 to 8 |" in table


@pytest.mark.parametrize("block_q", [1, 2, 4, 7])
def test_there_are_always_enough_programs_for_a_row(block_q: int) -> None:
    for lengths in ([1], [1, 1, 1], [3, 2, 8, 1, 5], [4, 4, 4], [40, 1, 2, 17]):
        starts = worked.tile_starts(lengths, block_q)
        for length, first, following in zip(lengths, starts, starts[1:], strict=False):
            assert first + -(-length // block_q) <= following


def test_shares_are_equal_and_have_every_tile_once() -> None:
    for contexts in ([1], [300, 20, 180], [64, 64], [8192, 100, 640, 1]):
        for count in (1, 3, 16):
            found = worked.shares(contexts, 64, count)
            tiles = [tile for share in found for tile in share]
            assert tiles == sorted(set(tiles)) and len(tiles) == sum(-(-n // 64) for n in contexts)
            assert len(found) == count and max(map(len, found)) == -(-len(tiles) // count)


def test_the_engine_cuts_the_same_shares() -> None:
    """On an H100, for the longest possible context."""
    pytest.importorskip("triton")
    import torch

    from nanoserve.kernels.triton.paged_attention import tile_config

    config = tile_config(128, torch.bfloat16, group=2, is_decode=True)
    assert config.tile_n == 64
    assert worked.num_shares(132, num_kv_heads=8) == config.num_programs * 132 // 8 == 33


def test_the_loss_with_rows_of_different_lengths() -> None:
    assert worked.longest_part([640] * 4, 64, 4) == 1
    assert worked.longest_part([640, 64, 64, 64], 64, 4) == 10 / (13 / 4)
    assert worked.shares_table([300, 20, 180], 64, 3).splitlines()[2:] == [
        "| 0 | 0, 1, 2 |  |  |",
        "| 1 | 3, 4 | 0 |  |",
        "| 2 |  |  | 0, 1, 2 |",
    ]


def test_a_key_lies_where_torch_and_the_kernel_say() -> None:
    """As in the kernel's docstring: position 35 of [5, 2, 8, 12] is offset 3 of block 8."""
    torch = pytest.importorskip("torch")
    cache = torch.zeros(2, 13, 8, 16, 128)
    offset = worked.key_offset([5, 2, 8, 12], 35, 2, kv_heads=8, block_size=16, head_dim=128)
    assert offset == 8 * 16_384 + 2 * 2_048 + 3 * 128 == 135_552
    found = cache[0, 8, 2, 3]
    assert found.storage_offset() == offset
    assert cache[0].stride() == (16_384, 2_048, 128, 1)


def test_where_an_int32_ends() -> None:
    """2^31 / 16,384 = 131,072 blocks: of 32 KiB each in 16 bits, 4 GiB of one layer's K."""
    first = worked.first_block_beyond_int32(kv_heads=8, block_size=16, head_dim=128)
    assert first == 131_072
    assert (first - 1) * 16_384 < 2**31 <= first * 16_384


def test_rates_of_gpus_match_their_data_sheets() -> None:
    """312 and 989.4 TFLOP/s in bfloat16 without sparsity; 432 and 528 tensor cores."""
    assert worked.tflops("A100") == pytest.approx(312, abs=0.2)
    assert worked.tflops("H100") == pytest.approx(989.4, abs=0.1)
    table = worked.gpu_table()
    assert "| tensor cores | 432 | 528 |" in table
    assert "| its bandwidth | 2.04 TB/s | 3.35 TB/s |" in table
    assert "| resident threads, at most | 221,184 | 270,336 |" in table


def test_shared_memory_is_ten_times_as_fast_as_hbm() -> None:
    """128 bytes x 132 x 1.98 GHz = 33.5 TB/s."""
    assert worked.shared_tb_per_second("H100") == pytest.approx(33.454, abs=1e-3)
    assert worked.shared_tb_per_second("A100") == pytest.approx(19.492, abs=1e-3)
    assert "| 19.5 / 33.5 | the threads of one program |" in worked.memories_table()
    assert "256 KiB per multiprocessor, 27 / 33 MiB in all" in worked.memories_table()


def test_bytes_that_an_h100_reads_during_one_launch() -> None:
    assert worked.megabytes_within("H100", 10) == pytest.approx(33.5)
    assert worked.kilobytes_under_way("H100", 0.5) == pytest.approx(12.69, abs=0.01)


def test_programs_that_fit_on_a_multiprocessor() -> None:
    """For decode, 160 x 128 registers each: 3.2. With 8 warps and 192 registers: 1.33."""
    assert worked.programs_at_once("H100", registers=156, warps=4, shared_kib=70) == 3
    assert worked.programs_at_once("A100", registers=157, warps=4, shared_kib=70) == 2
    assert worked.programs_at_once("H100", registers=189, warps=8, shared_kib=130) == 1
    assert worked.programs_at_once("H100", registers=24, warps=8, shared_kib=0) == 8
    assert worked.occupancy(programs=2, warps=4) == 0.125
    assert worked.occupancy(programs=8, warps=8) == 1


def test_a_warp_with_adjacent_loads_gets_no_more_bytes_than_it_requests() -> None:
    assert worked.bytes_for_a_warp(element_bytes=4, stride=1) == 128
    assert worked.bytes_for_a_warp(element_bytes=2, stride=1) == 64
    assert worked.bytes_for_a_warp(element_bytes=2, stride=2) == 128
    assert worked.bytes_for_a_warp(element_bytes=2, stride=128) == 1024
    assert worked.bytes_for_a_warp(element_bytes=16, stride=1) == 512


def test_only_tiles_on_the_diagonal_need_masks() -> None:
    """Queries 300 to 363 see 364 keys: 4 whole tiles of 64 before 256, then two that end."""
    assert worked.key_tiles(500, 200, block_q=64, tile_n=64) == [(4, 2), (5, 2), (6, 2), (7, 1)]
    assert worked.num_programs(200, 1, block_q=64) == 4
    # A prompt of 2,048: program i has i unmasked tiles and one with masks, 496 and 32 in all.
    assert worked.key_tiles(2048, 2048, 64, 64) == [(i, 1) for i in range(32)]
    assert worked.masked_percent(2048, 64, 64) == pytest.approx(100 * 32 / 528)


def test_enough_programs_are_launched_for_any_rows() -> None:
    """17 tokens in rows of 5, 3 and 9, tiles of 4 tokens: seven programs as in the table."""
    assert worked.num_programs(17, 3, block_q=4) == 7 == worked.tile_starts([5, 3, 9], 4)[-1]
