"""Stage 6: long prompts in chunks, and who gives way when the pool is empty."""

import random

import pytest

from .stages import check_plans, stage
from .your_engine import Config, Plan, Scheduler, Sequence


def planned(plan: Plan, *sequences: Sequence) -> list[int]:
    """Tokens of each of `sequences` in this step."""
    tokens = {row.seq: row.n for row in plan.rows}
    return [tokens.get(seq, 0) for seq in sequences]


@stage(6)
def test_the_threshold_leaves_tokens_for_others() -> None:
    scheduler = Scheduler(Config(num_blocks=100, block_size=4, budget=64, threshold=10))
    long, short = Sequence([1] * 35), Sequence([2] * 6)
    scheduler.add(long)
    scheduler.add(short)
    found = []
    for _ in range(4):
        plan = scheduler.schedule()
        found.append(planned(plan, long, short))
        scheduler.update(plan, [9] * sum(row.catches_up for row in plan.rows))
    case = "prompts of 35 and 6 tokens, threshold 10: tokens of each in the first steps"
    assert found == [[10, 6], [10, 1], [10, 1], [5, 1]], case


@stage(6)
def test_the_last_to_arrive_gives_way() -> None:
    scheduler = Scheduler(Config(num_blocks=3, block_size=4, budget=64))
    a, b = Sequence([1] * 4), Sequence([2] * 8)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    plan = scheduler.schedule()
    case = "prompts of 4 and 8 tokens in three blocks of 4; both need a block for the next"
    assert plan.preempted == [b], case
    assert planned(plan, a, b) == [1, 0], case
    assert (b.block_table, b.num_computed, b.finish_reason) == ([], 0, None), case
    assert b.token_ids == [2] * 8 + [9], f"{case}: its tokens are kept"
    assert list(scheduler.waiting) == [b], case


@stage(6)
def test_it_may_be_the_one_that_needs_the_block() -> None:
    scheduler = Scheduler(Config(num_blocks=2, block_size=4, budget=64))
    a, b = Sequence([1] * 2), Sequence([2] * 4)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    plan = scheduler.schedule()
    case = "prompts of 2 and 4 tokens in two blocks of 4; the second needs a block"
    assert (plan.preempted, planned(plan, a, b)) == ([b], [1, 0]), case


@stage(6)
def test_it_comes_back_with_what_is_still_cached() -> None:
    scheduler = Scheduler(Config(num_blocks=4, block_size=4, budget=64))
    a, b = Sequence([1] * 4, max_len=6), Sequence([2] * 12)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    scheduler.update(scheduler.schedule(), [9])  # b has given way, and a has ended
    (row,) = scheduler.schedule().rows
    case = "prompts of 4 and 12 tokens in four blocks of 4; a took one of b's"
    assert (row.seq, row.start, row.n) == (b, 8, 5), case


@pytest.mark.parametrize("seed", range(40))
@stage(6)
def test_it_plans_what_the_engine_plans(seed: int) -> None:
    rng = random.Random(seed)
    max_num_seqs, block_size = rng.randint(2, 6), rng.randint(1, 4)
    alone = -(-40 // block_size)  # blocks of the longest sequence
    options = {"num_blocks": alone + rng.randint(0, alone), "block_size": block_size}
    options |= {"max_num_seqs": max_num_seqs, "threshold": rng.choice([0, 0, 1, 5])}
    options["budget"] = max_num_seqs + rng.choice([0, 1, 10, 40])
    steps = sorted(rng.randint(0, 25) for _ in range(15))
    check_plans(
        options,
        [
            (at, [rng.randrange(2) for _ in range(rng.randint(1, 30))], rng.randint(1, 40))
            for at in steps
        ],
        max_len=40,
    )


@stage(6)
def test_the_random_cases_preempt() -> None:
    """Or the test above would say little."""
    options = {"num_blocks": 12, "block_size": 2, "max_num_seqs": 5, "budget": 20}
    arrivals = [(i, [i % 3] * 6, 10) for i in range(8)]
    found = check_plans(options, arrivals, max_len=20)
    assert found > 3, f"{found} preemptions with Config(**{options}), arrivals {arrivals}"
