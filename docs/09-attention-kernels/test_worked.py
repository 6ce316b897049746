"""The numbers of the course's chapter on attention kernels, against values worked by hand."""

from math import exp

import pytest

from . import worked


def test_scores_of_a_long_prompt_are_far_larger_than_what_goes_in_and_out() -> None:
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
def test_there_is_always_room_for_all_tiles_of_a_row(block_q: int) -> None:
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
    """On an H100, for as long a context as there may be."""
    pytest.importorskip("triton")
    import torch

    from nanoserve.kernels.paged_attention import tile_config

    config = tile_config(128, torch.bfloat16, group=2, is_decode=True)
    assert config.tile_n == 64
    assert worked.num_shares(132, num_kv_heads=8) == config.num_programs * 132 // 8 == 33


def test_what_rows_of_different_lengths_lose() -> None:
    assert worked.longest_part([640] * 4, 64, 4) == 1
    assert worked.longest_part([640, 64, 64, 64], 64, 4) == 10 / (13 / 4)
    assert worked.shares_table([300, 20, 180], 64, 3).splitlines()[2:] == [
        "| 0 | 0, 1, 2 |  |  |",
        "| 1 | 3, 4 | 0 |  |",
        "| 2 |  |  | 0, 1, 2 |",
    ]
