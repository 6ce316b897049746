"""Chapter 7's numbers against values worked by hand. W9 is the course's own example."""

import itertools
import random
from pathlib import Path

import pytest

from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.features.trace.reader import Pool, read_trace
from nanoserve.sampling_params import SamplingParams

from . import worked


def cells(table: str) -> list[list[str]]:
    """Return the rows of a Markdown table, without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_w9_chunks() -> None:
    assert worked.chunks(1000, threshold=256, budget=2048) == "256 + 256 + 256 + 232"
    assert worked.chunks(1000, threshold=0, budget=2048) == "1000"
    assert worked.chunks(40, threshold=0, budget=16, decoding=1) == "15 + 15 + 10"


def test_w9_a_chunk_and_decodes_in_one_step() -> None:
    table = worked.mixed_steps(decoding=3, prompt_len=1000, next_prompt_len=50, threshold=256)
    assert cells(table) == [
        ["1", "3", "256", "0", "259"],
        ["2", "3", "256", "50", "309"],
        ["3", "3", "256", "1", "260"],
        ["4", "3", "232", "1", "236"],
    ]


def test_w20_a_step_reads_14_gb_or_computes_14_gflop_a_token() -> None:
    assert worked.step_seconds(1, "LLaMA-2-7B", "A100") == pytest.approx(0.007)
    assert worked.step_seconds(1000, "LLaMA-2-7B", "A100") == pytest.approx(14e12 / 312e12)
    assert worked.balanced_tokens("LLaMA-2-7B", "A100") == pytest.approx(156)
    assert worked.balanced_tokens("Llama-3.1-8B", "H100") == pytest.approx(295.2, abs=0.1)


def test_what_the_size_of_a_chunk_does() -> None:
    # 14e9 / 312e12 s = 44.87 us a token: 4128 of them 185.2 ms, 288 of them 12.92 ms.
    table = worked.chunk_table(4096, 32, [4096, 256, 64], "LLaMA-2-7B", "A100")
    assert cells(table) == [
        ["4,096", "1", "185.2 ms", "185 ms"],
        ["256", "16", "12.9 ms", "207 ms"],
        ["64", "64", "7.0 ms", "448 ms"],
    ]
    assert cells(worked.chunk_table(100, 0, [64], "LLaMA-2-7B", "A100"))[0][1] == "2"


def test_preemption_step_by_step() -> None:
    requests = [(32, 4), (32, 8), (16, 4), (16, 2)]
    assert [row[1:] for row in cells(worked.preemption_steps(requests, num_kv_blocks=6))] == [
        ["A: 32, B: 32, C: 16, D: 16", "none", "none", "0"],
        ["A: 1, B: 1", "D, C", "C, D", "0"],
        ["A: 1, B: 1", "none", "C, D", "0"],
        ["A: 1, B: 1", "none", "C, D", "3"],
        ["B: 1, C: 17", "none", "D", "1"],
        ["B: 1, C: 1", "none", "D", "1"],
        ["B: 1, C: 1", "none", "D", "3"],
        ["B: 1, D: 17", "none", "none", "6"],
    ]


def test_a_victim_waits_until_a_sequence_has_ended() -> None:
    """By hand: C has 17 tokens, so it needs two blocks; A's three are free after step 4."""
    requests = [(32, 4), (32, 8), (16, 4), (16, 2)]
    assert [row[1:] for row in cells(worked.head_of_the_queue(requests, num_kv_blocks=6))] == [
        ["none", "none", "0", "none", ""],
        ["D, C", "none", "0", "C", "2"],
        ["none", "none", "0", "C", "2"],
        ["none", "A", "3", "C", "2"],
    ]


def test_with_a_prefix_cache_a_victim_loses_only_the_blocks_reused_meanwhile() -> None:
    assert worked.tokens_computed_again(160, prefix_caching=False) == 161
    assert worked.tokens_computed_again(160, prefix_caching=True) == 161 - 8 * 16


def test_a_long_prompt_admitted_with_blocks_for_its_first_chunk_thrashes() -> None:
    """By hand, chunks of 31 beside one decode row.

    In 12 - 3 and 12 - 4 blocks four chunks fit (124 tokens), and the fifth preempts: four times.
    From the 24th step on, in 12 - 5 blocks, three fit (93 tokens): four times, the first one cut
    short. Then two chunks before the other ends in its 38th step, three of 32 and one of 2 after
    it, and one output token.
    """
    wasted = 4 * 124 + 4 * 93
    arguments = {"prompt_len": 160, "num_kv_blocks": 12, "budget": 32}
    assert worked.admission(on_first_chunk=True, **arguments) == f"{wasted + 161:,} | 8 | 43"
    assert worked.admission(on_first_chunk=False, **arguments) == "161 | 0 | 44"


def test_reserving_the_longest_output_costs_concurrency() -> None:
    assert worked.concurrency(1000, prompt_len=100, reserved_output=0) == 1000 // 7
    assert worked.concurrency(1000, prompt_len=100, reserved_output=1000) == 1000 // 69


def test_swapping_against_recomputing() -> None:
    assert worked.MODELS["LLaMA-2-7B"].kv_bytes_per_token == 512 * 1024
    assert cells(worked.swap_table(1000)) == [
        ["LLaMA-2-7B", "A100", "512 KiB", "42 ms", "45 ms"],
        ["Llama-3.1-8B", "A100", "128 KiB", "10 ms", "51 ms"],
        ["LLaMA-2-70B", "A100", "320 KiB", "26 ms", "449 ms"],
        ["LLaMA-2-7B", "H100", "512 KiB", "21 ms", "14 ms"],
        ["Llama-3.1-8B", "H100", "128 KiB", "5 ms", "16 ms"],
        ["LLaMA-2-70B", "H100", "320 KiB", "13 ms", "142 ms"],
    ]


def test_no_victim_is_admitted_again_before_a_sequence_ends() -> None:
    """Chapter 7 gives the reason; it holds for FCFS and different texts."""
    for seed, prefix_caching in itertools.product(range(100), (False, True)):
        check_a_life(seed, prefix_caching)


def check_a_life(seed: int, prefix_caching: bool) -> None:
    rng = random.Random(seed)
    config = EngineConfig(
        "none",
        block_size=2,
        max_num_seqs=6,
        max_num_batched_tokens=6 + rng.choice([0, 3, 40]),
        enable_prefix_caching=prefix_caching,
    )
    scheduler = Scheduler(config, num_kv_blocks=rng.randint(10, 20), max_model_len=20)
    for arrival in range(12):
        prompt = [arrival] * rng.randint(1, 19)
        params = SamplingParams(max_tokens=rng.choice([1, 5, None]))
        scheduler.add(Sequence(str(arrival), prompt, params, max_model_len=20, arrival=arrival))
    none_ended_since_a_preemption = False
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        if plan.preempted:
            none_ended_since_a_preemption = True
        assert not (plan.admitted and none_ended_since_a_preemption), (seed, prefix_caching)
        scheduler.commit(plan)
        scheduler.update(plan, [[int(row.seq.request_id)] for row in plan.sampled])
        if any(row.seq.finished for row in plan.sampled):
            none_ended_since_a_preemption = False


def test_the_recorded_run_is_as_the_text_describes_it() -> None:
    """The pool is full from step 5 on; #3 is preempted in step 15 and returns in step 18."""
    trace = read_trace(Path(__file__).with_name("preemption.jsonl"))
    pool, free = Pool(), []
    for step in trace.steps:
        pool.advance(step)
        free.append(trace.header["num_kv_blocks"] - len(pool.ref_counts()))
        pool.release(step)
    assert free[:19] == [1] * 5 + [0] * 10 + [1] * 3 + [2]
    assert {step["step"]: step["preempted"] for step in trace.steps if step["preempted"]} == {
        15: [3]
    }
    (back,) = [row for row in trace.steps[18]["rows"] if row["seq"] == 3]
    assert back["computed"] == 16 and [end["seq"] for end in trace.steps[17]["finished"]] == [1]
