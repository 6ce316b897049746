"""Chapter 23's numbers, by hand and against the engine's own."""

import pytest

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.shapes import SHAPES
from nanoserve.features.parallel.pipeline_stage import join_stage

from . import worked


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_what_fits_beside_the_weights() -> None:
    # 8 x 72 GB less 137.95 GB of weights, at 327,680 bytes a token.
    assert worked.kv_tokens(1, 1, 8) == int((8 * 72e9 - 137_953_296_384) // 327_680) == 1_336_812
    assert worked.kv_tokens(1, 2, 4) == worked.kv_tokens(1, 8, 1) == worked.kv_tokens(1, 1, 8)
    assert worked.kv_tokens(4, 1, 2) == pytest.approx(4 * (144e9 - 137.953e9) / 327_680, rel=1e-3)
    rows = cells(worked.ways_table())
    assert [row[4] for row in rows][-1] == "does not fit"
    assert rows[0][3:] == ["17.2 GB", "1,336,812", "1,336,812", "5.1 ms"]
    assert rows[2][6] == rows[5][6] == "41.2 ms"  # 137.95 / 3.35: stages do not shorten it


def test_bubbles() -> None:
    assert worked.bubble(4, 4) == 3 / 7
    assert worked.bubble(3, 4) == 2 / 6
    assert cells(worked.bubble_table([2, 4], [1, 4])) == [
        ["2", "50.0%", "20.0%"],
        ["4", "75.0%", "42.9%"],
    ]


def test_a_schedule_is_as_busy_as_the_formula_says() -> None:
    rows = [row[1:] for row in cells(worked.schedule_table(3, 4))]
    assert rows == [
        ["1", "2", "3", "4", "", ""],
        ["", "1", "2", "3", "4", ""],
        ["", "", "1", "2", "3", "4"],
    ]
    idle = sum(row.count("") for row in rows) / 18
    assert idle == worked.bubble(3, 4)


def test_steps_alternate_between_the_sequences() -> None:
    steps = worked.who_runs(8, 64, stages=3, shared=True, num_steps=12)
    assert steps[0] == {"A": 64, "B": 64, "C": 43}  # 171 tokens, a third of 8 x 64
    assert all(steps), "no stage is left without a step"
    table = cells(worked.who_runs_table(8, 64, stages=3, num_steps=4))
    assert table[0][1] == "A: 64, B: 64, C: 43" and table[1][2] == "none"
    assert table[3][2] == "A to H: 1 each"
    decoding = steps[-3:]
    assert sorted(name for step in decoding for name in step) == list("ABCDEFGH")
    assert {len(step) for step in decoding} <= {2, 3}
    taken = worked.who_runs(8, 64, stages=3, shared=False, num_steps=6)
    assert [len(step) for step in taken] == [8, 0, 0, 8, 0, 0]


def test_bytes_of_ranks_and_of_stages() -> None:
    assert worked.pp_bytes(32) == 32 * 16_384 == 524_288
    assert worked.tp_bytes(32, 8) == 161 * 1.75 * 524_288
    rows = cells(worked.traffic_table(8, [2048]))
    assert rows[0] == ["2,048", "8 ranks", "9,454.0 MB", "21.01 ms", "378.16 ms"]
    assert rows[1] == ["2,048", "8 stages", "33.6 MB", "0.07 ms", "1.34 ms"]


def test_stages_alone_do_not_make_a_batch_faster() -> None:
    assert worked.decode_rate(64, tp=1, pp=8) == pytest.approx(worked.decode_rate(64, 1, 1))
    assert worked.decode_rate(64, tp=8, pp=1) == pytest.approx(8 * worked.decode_rate(64, 1, 1))
    assert worked.decode_rate(64, 1, 1) == pytest.approx(64 / worked.read_ms(1) * 1e3)


def test_a_request_goes_elsewhere_when_more_waits_at_its_prefix_than_it_saves() -> None:
    assert [row[3] for row in cells(worked.overflow_table(1000, 800, [0, 700, 900]))] == list("AAB")
    assert worked.chosen(1000, 800, 799) == "A" and worked.chosen(1000, 800, 801) == "B"
    assert worked.no_favour_at() == pytest.approx(1.2)


def test_both_simple_rules_fail_in_their_own_way() -> None:
    hot = {policy: worked.fleet("one hot prefix", policy) for policy in worked.POLICIES}
    assert hot["pure affinity"].spread == pytest.approx(4.0)  # one replica computes it all
    assert hot["pure affinity"].mean_ttft > 10 * hot["ours, approximate"].mean_ttft
    talks = {policy: worked.fleet("conversations", policy) for policy in worked.POLICIES}
    assert talks["least loaded"].hits < 0.6 * talks["ours, approximate"].hits
    assert len(cells(worked.fleet_table())) == 6


def test_the_layers_of_four_stages_make_the_largest_pool() -> None:
    """By hand: the slowest of four reads 10.9 layers' weights, the head and one layer."""
    assert worked.layers_of_stages("qwen3-0.6b", 4) == [9, 9, 9, 1]


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (2, 3)])
def test_ranks_are_where_the_engine_puts_them(tp: int, pp: int) -> None:
    config = ModelConfig.from_hf(SHAPES["tiny"], {})
    for rank in range(tp * pp):
        found = join_stage(pp, tp, rank, config, lambda name, rank, size: None)
        assert (found.pp.index, found.tp.rank) == worked.place(rank, tp, pp), (rank, tp, pp)


def test_the_groups_of_two_numberings() -> None:
    rows = cells(worked.groups_table(tp=2, pp=2, dp=2))
    assert [row[3] for row in rows] == list("01234567")
    assert rows[0] == ["0", "0", "0", "0", "2"]  # vLLM's rank 0 is in the first stage
    assert rows[2] == ["0", "1", "0", "2", "0"]  # nanoserve's is in the last
    assert worked.place_in_vllm(5, tp=2, pp=2) == (1, 0, 1)
    for _, stage, inside, _, ours in rows:
        assert worked.place(int(ours), 2, 2) == (int(stage), int(inside))


def test_how_long_a_new_replica_reads() -> None:
    assert worked.start_seconds(2.0) == pytest.approx(68.98, abs=0.01)
