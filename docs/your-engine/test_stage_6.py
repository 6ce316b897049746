"""Stage 6: long prompts in chunks, and preemption when the pool is empty."""

import random
from collections.abc import Iterable

import pytest

from .stages import check_plans, random_case, stage
from .your_engine import Config, Plan, Scheduler, Sequence


def named(found: Iterable[Sequence], **names: Sequence) -> list[str]:
    """Names of the found sequences, for messages."""
    by_sequence = {seq: name for name, seq in names.items()}
    return [by_sequence[seq] for seq in found]


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
def test_the_last_to_arrive_is_preempted() -> None:
    scheduler = Scheduler(Config(num_blocks=3, block_size=4, budget=64))
    a, b = Sequence([1] * 4), Sequence([2] * 8)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    plan = scheduler.schedule()
    case = "a has 4 and b 8 tokens of prompt, in three blocks of 4; both need one more for the next"
    assert named(plan.preempted, a=a, b=b) == ["b"], f"preempted: {case}"
    assert planned(plan, a, b) == [1, 0], f"tokens of each: {case}"
    assert (b.block_table, b.num_computed, b.finish_reason) == ([], 0, None), case
    assert b.token_ids == [2] * 8 + [9], f"{case}: its tokens are kept"
    assert named(scheduler.waiting, a=a, b=b) == ["b"], f"waiting: {case}"


@stage(6)
def test_the_victim_may_be_the_sequence_that_needs_the_block() -> None:
    scheduler = Scheduler(Config(num_blocks=2, block_size=4, budget=64))
    a, b = Sequence([1] * 2), Sequence([2] * 4)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    plan = scheduler.schedule()
    case = "a has 2 and b 4 tokens of prompt, in two blocks of 4; b needs one more"
    assert named(plan.preempted, a=a, b=b) == ["b"], f"preempted: {case}"
    assert planned(plan, a, b) == [1, 0], f"tokens of each: {case}"


@stage(6)
def test_it_is_admitted_again_with_cached_blocks() -> None:
    scheduler = Scheduler(Config(num_blocks=4, block_size=4, budget=64))
    a, b = Sequence([1] * 4, max_len=6), Sequence([2] * 12)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    scheduler.update(scheduler.schedule(), [9])  # b was preempted, and a has ended
    rows = scheduler.schedule().rows
    case = "a has 4 and b 12 tokens of prompt, in four blocks of 4; a took one of b's and ended"
    assert named((row.seq for row in rows), a=a, b=b) == ["b"], case
    assert (rows[0].start, rows[0].n) == (8, 5), f"start and tokens of b's row: {case}"


@pytest.mark.parametrize("seed", range(40))
@stage(6)
def test_it_plans_what_the_engine_plans(seed: int) -> None:
    """The first cases are the smallest."""
    check_plans(*random_case(random.Random(seed), 2 + seed // 3, min(30, 10 + seed)), max_len=40)


@stage(6)
def test_the_random_cases_preempt() -> None:
    """Without preemptions, the test above would say little."""
    options = {"num_blocks": 12, "block_size": 2, "max_num_seqs": 5, "budget": 20}
    arrivals = [(i, [i % 3] * 6, 10) for i in range(8)]
    found = check_plans(options, arrivals, max_len=20)
    assert found > 3, f"check_plans({options}, {arrivals}, 20) found {found} preemptions"
