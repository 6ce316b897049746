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


@pytest.mark.parametrize(
    ("num_programs", "num_keys", "expected"),
    [(8, 8192, 16), (256, 8192, 1), (8, 1024, 4), (8, 100, 1), (1, 10**6, 64), (8, 40_960, 16)],
)
def test_splits_on_an_a100(num_programs: int, num_keys: int, expected: int) -> None:
    """27 programs per row and head would fill it, so 16; none has fewer than 256 keys."""
    assert worked.num_splits(num_programs, num_keys, tile_n=64, multiprocessors=108) == expected


def test_the_engine_chooses_the_same_splits() -> None:
    pytest.importorskip("triton")
    import torch

    from nanoserve.kernels.paged_attention import _choose_num_splits

    cpu = torch.device("cpu")  # taken for a GPU of 8 multiprocessors
    for num_programs in (1, 2, 3, 8, 17):
        for num_keys in (1, 63, 64, 200, 1000, 5000):
            expected = _choose_num_splits(num_programs, num_keys, 16, cpu)
            assert worked.num_splits(num_programs, num_keys, 16, 8) == expected


def test_a_short_context_leaves_splits_empty() -> None:
    assert worked.tiles_of_splits(8192, tile_n=64, splits=16) == [8] * 16
    assert worked.tiles_of_splits(100, tile_n=64, splits=16) == [1, 1] + [0] * 14
    assert worked.tiles_of_splits(640, tile_n=64, splits=4) == [3, 3, 3, 1]
