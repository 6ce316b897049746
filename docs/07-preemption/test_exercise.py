"""Tests for the exercise of chapter 7, against the engine's own scheduler."""

import random

import pytest

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence

from .exercise import Running, schedule_running


def decoding(
    name: str, num_tokens: int, num_blocks: int, arrival: int, priority: int = 0
) -> Running:
    return Running(name, num_tokens, num_tokens - 1, num_blocks, arrival, priority)


def test_with_free_blocks_all_sequences_run() -> None:
    running = [decoding("a", 17, 1, 1), decoding("b", 5, 1, 2)]
    case = f"schedule_running({running}, 1, 16, budget=10)"
    assert schedule_running(running, 1, 16, budget=10) == ({"a": 1, "b": 1}, []), case


def test_a_prompt_is_cut_by_the_budget_and_by_the_threshold() -> None:
    running = [decoding("a", 5, 1, 1), Running("b", 100, 0, 7, 2)]
    case = f"schedule_running({running}, 0, 16, budget=50"
    assert schedule_running(running, 0, 16, 50) == ({"a": 1, "b": 49}, []), f"{case})"
    found = schedule_running(running, 0, 16, 50, threshold=20)
    assert found == ({"a": 1, "b": 20}, []), f"{case}, threshold=20)"


def test_the_last_to_arrive_is_preempted_first() -> None:
    running = [decoding("a", 17, 1, 1), decoding("b", 5, 1, 2), decoding("c", 5, 1, 3)]
    case = f"schedule_running({running}, 0, 16, budget=10)"
    assert schedule_running(running, 0, 16, budget=10) == ({"a": 1, "b": 1}, ["c"]), case


def test_it_may_be_the_one_that_needs_the_block() -> None:
    running = [decoding("a", 5, 1, 1), decoding("b", 17, 1, 2)]
    case = f"schedule_running({running}, 0, 16, budget=10)"
    assert schedule_running(running, 0, 16, budget=10) == ({"a": 1}, ["b"]), case


def test_a_victim_that_was_planned_gives_back_blocks_and_budget() -> None:
    # "low" gets the only free block, and loses it to "high" together with its own.
    low, high = decoding("low", 17, 1, 1, priority=5), decoding("high", 33, 2, 2, priority=1)
    more = Running("more", 60, 0, 4, 3, priority=2)
    case = f"schedule_running({[low, high, more]}, 1, 16, budget=11, by_priority=True)"
    planned, victims = schedule_running([low, high, more], 1, 16, budget=11, by_priority=True)
    assert victims == ["low"], case
    assert planned == {"high": 1, "more": 10}, case


def test_a_victim_gives_back_the_block_that_it_got_in_this_step() -> None:
    low = decoding("low", 17, 1, 1, priority=5)
    others = [decoding("b", 17, 1, 2), decoding("c", 17, 1, 3)]
    case = f"schedule_running({[low, *others]}, 1, 16, budget=10, by_priority=True)"
    planned, victims = schedule_running([low, *others], 1, 16, budget=10, by_priority=True)
    assert (planned, victims) == ({"b": 1, "c": 1}, ["low"]), case


def test_without_by_priority_only_the_arrival_counts() -> None:
    low, high = decoding("low", 17, 1, 1, priority=5), decoding("high", 33, 2, 2, priority=1)
    case = f"schedule_running({[low, high]}, 1, 16, budget=11)"
    assert schedule_running([low, high], 1, 16, budget=11) == ({"low": 1}, ["high"]), case


@pytest.mark.parametrize("seed", range(60))
def test_it_decides_as_the_engine_decides(seed: int) -> None:
    rng = random.Random(seed)
    config = EngineConfig(
        "none",
        block_size=rng.randint(1, 4),
        max_num_seqs=6,
        max_num_batched_tokens=6 + rng.choice([0, 1, 10, 40]),
        long_prefill_token_threshold=rng.choice([0, 0, 1, 3]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=False,
    )
    fits_alone = -(-24 // config.block_size)
    scheduler = Scheduler(config, fits_alone + rng.randint(0, fits_alone), max_model_len=24)
    num_to_come = 15
    while num_to_come or scheduler.has_unfinished():
        while num_to_come and rng.random() < 0.5:
            num_to_come -= 1
            params = SamplingParams(max_tokens=rng.choice([1, 4, None]))
            settings = {"arrival": 15 - num_to_come, "priority": rng.randint(0, 2)}
            prompt = [1] * rng.randint(1, 23)
            scheduler.add(Sequence(str(num_to_come), prompt, params, 24, **settings))
        running = [
            Running(
                seq.request_id,
                seq.num_tokens,
                seq.num_computed_tokens,
                len(seq.block_table),
                seq.arrival,
                seq.priority,
            )
            for seq in scheduler.running
        ]
        arguments = (
            running,
            scheduler.block_manager.num_free_blocks,
            config.block_size,
            config.max_num_batched_tokens,
            config.long_prefill_token_threshold,
            config.scheduling_policy == "priority",
        )
        case = f"schedule_running{arguments}"
        found = schedule_running(*arguments)
        plan = scheduler.schedule()
        admitted = {seq.request_id for seq in plan.admitted}
        planned = {row.seq.request_id: row.n for row in plan.rows}
        expected = {name: n for name, n in planned.items() if name not in admitted}
        assert found == (expected, [seq.request_id for seq in plan.preempted]), case
        scheduler.commit(plan)
        scheduler.update(plan, [[7] for _ in plan.sampled])
