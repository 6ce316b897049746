"""Tests of the worked examples on benchmarking, against values computed by hand."""

import numpy as np
import pytest

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.cli.bench.latency import latencies
from nanoserve.cli.bench.roofline import Need, Step
from nanoserve.cli.bench.shapes import SHAPES

from . import worked


def test_percentiles_lie_between_two_values() -> None:
    """Places 4.5, 8.1 and 8.91 of ten: 23.5, 30 + 0.1 x 370, 30 + 0.91 x 370."""
    found = [worked.percentile(worked.TTFTS, p) for p in (0, 50, 90, 99, 100)]
    assert found == pytest.approx([20, 23.5, 67, 366.7, 400])
    assert worked.mean(worked.TTFTS) == pytest.approx(61.3)
    assert "| 61.3 | 23.5 | 67.0 | 366.7 | 400.0 |" in worked.percentile_table(worked.TTFTS)
    assert worked.percentile([7.0], 99) == 7.0
    assert worked.samples_beyond(64, 99) == pytest.approx(0.64)


def test_the_bench_has_the_same_percentiles() -> None:
    found = latencies([0.0] * 10, [[ms / 1000] for ms in worked.TTFTS], slo_ttft=1, slo_itl=1)
    assert found["ttft_p90"] == pytest.approx(67)


def test_littles_law() -> None:
    """Four a second that stay 2.5 s are ten; 16 slots of 128 steps of 30 ms make 4.17 a second."""
    assert worked.in_system(4, 2.5) == 10
    assert worked.rate_through(10, 2.5) == 4
    assert worked.requests_per_second(16, 128, 0.030) == pytest.approx(4.1667, abs=1e-4)


def test_arrivals_come_in_bursts() -> None:
    """Poisson with mean 4: 1 - e^-4 (1 + 4 + 8 + 10.667 + 10.667 + 8.533 + 5.689 + 3.251)."""
    assert worked.poisson_at_least(4, 8) == pytest.approx(0.0511, abs=1e-4)
    assert worked.poisson_at_least(4, 0) == pytest.approx(1)
    assert worked.gap_shorter_than(4, 0.1) == pytest.approx(0.3297, abs=1e-4)


def test_a_stall_is_hidden_by_a_client_that_waits() -> None:
    """The k-th request behind the stall waits 2 - 0.09 k seconds: 22 of them, and the stall.

    In order, places 89 and 90 are 2 - 0.9 and 2 - 0.81; places 98 and 99 are 1.91 and 2.
    """
    due, durations = worked.stall(count=100, every=0.1, usual=0.01, at=50, long=2.0)
    assert (due[50], durations[50], durations[51]) == (pytest.approx(5.0), 2.0, 0.01)
    found = worked.waits(due, durations)
    assert found[51] == pytest.approx(1.91) and found[72] == pytest.approx(0.02)
    assert found[73] == pytest.approx(0.01)
    assert worked.percentile(found, 90) == pytest.approx(1.109)
    assert worked.percentile(found, 99) == pytest.approx(1.9109)
    assert worked.percentile(durations, 99) == pytest.approx(0.0299)
    sent, asked = worked.omission_table(100, 0.1, 0.01, 50, 2.0).splitlines()[2:]
    assert sent == "| when it was sent | 10 | 10 | 30 | 1 |"
    assert asked == "| when it was due | 10 | 1109 | 1911 | 22 |"


def test_goodput_counts_what_met_both_objectives() -> None:
    requests = [[0.1, 0.15], [0.3, 0.0], [0.2, 0.9]]
    assert worked.goodput(requests, 4.0, slo_ttft=0.25, slo_itl=0.5) == 0.25
    times = [[0.1, 0.2, 0.4], [1.3], [2.2, 2.9, 4.0]]
    assert latencies([0, 1, 2], times, 0.25, 0.5)["goodput"] == pytest.approx(0.25)


def test_what_few_runs_say_of_the_median() -> None:
    """Five: 1 - 2/32. Three: 1 - 2/8."""
    assert worked.median_inside(5) == 0.9375
    assert worked.median_inside(3) == 0.75
    assert worked.median_table(6).splitlines()[-1] == "| 6 | 96.9% |"


def test_a_drifting_machine_spoils_runs_that_are_far_apart() -> None:
    """1.1 times slower with every run. The runs of a pair are three apart in AAABBB, else one."""
    times = {"A": 1.0, "B": 1.2}
    assert worked.median_of_ratios("AAABBB", times, 1.1) == pytest.approx(1.2 * 1.331)
    assert worked.median_of_ratios("ABABAB", times, 1.1) == pytest.approx(1.32)
    rows = worked.drift_table(1.1, 1.2).splitlines()[2:]
    assert rows == ["| AAABBB | 1.60 |", "| ABABAB | 1.32 |"]


def test_ratios_and_their_means() -> None:
    assert worked.time_saved(1.64) == pytest.approx(0.3902, abs=1e-4)
    assert worked.arithmetic_mean([2.0, 0.5]) == 1.25
    assert worked.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert worked.speedup_of_part(0.25, 5) == pytest.approx(1.25)


def test_the_limit_of_a_decode_step_is_the_benchmarks() -> None:
    """1,191,968,768 bytes of weights; 32 contexts of 512 add 1,879,048,192."""
    assert worked.WEIGHT_BYTES == 1_191_968_768
    assert worked.decode_bytes(32, 512) == 3_071_016_960
    assert worked.limit_ms(32, 512, 4.8e12) == pytest.approx(0.6398, abs=1e-4)
    # 32 x 1,250,689,024 / 3,071,016,960: with 32 sequences, 13 times the tokens.
    assert "| 32 | 3.07 | 0.64 | 50,016 | 13.0x |" in worked.limit_table(512, 4.8e12)
    config = ModelConfig.from_hf(SHAPES["qwen3-0.6b"], {}, "bfloat16")
    step = Step(np.ones(32, dtype=int), np.full(32, 512), 32)
    embedding_rows = 32 * 1024 * 2
    assert Need(config).bytes(step) == worked.decode_bytes(32, 512) + embedding_rows


def test_few_flips_cost_much_agreement() -> None:
    """99 (1 - 0.99^64), with 0.99^64 = 0.52560."""
    assert worked.expected_prefix(0.01, 64) == pytest.approx(46.966, abs=1e-3)
    assert worked.expected_prefix(0, 64) == 64


def test_bytes_of_a_part_of_the_model() -> None:
    assert worked.weight_bytes(28, 2) == worked.WEIGHT_BYTES
    assert worked.weight_bytes(8, 4) == 4 * (125_829_120 + 155_582_464)


def test_rows_at_the_ridge() -> None:
    # 70 GFLOP/s and 10 GB/s: 7 operations a byte; a row takes half an operation a byte of float32.
    assert worked.ridge_rows(7e10, 1e10, item=4) == pytest.approx(14)
    assert worked.ridge_rows(7e10, 1e10, item=2) == pytest.approx(7)


def test_parts_of_a_step_beside_their_limit() -> None:
    # By hand, at 27 GB/s: 880.8, 513.8 and 311.2 MB.
    assert worked.parts_table(27e9).splitlines()[2:] == [
        "| products of the 28 layers | 56 | 33 | 58% |",
        "| decode attention | 34 | 19 | 56% |",
        "| LM head | 15 | 12 | 77% |",
        "| norms, gates, rotation | 7 | - |  |",
        "| sampling, Python between the parts | 7 | - |  |",
        "| together | 119 | 63 | 53% |",
    ]
    assert worked.parts_ms() == 119
    assert worked.parts_limit_ms(27e9) == pytest.approx(63.2, abs=0.1)
