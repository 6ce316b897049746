"""Stage 5: who runs, and how many tokens of each; in a pool that is large enough."""

import random

import pytest

from .stages import check_plans, stage
from .your_engine import Config, Plan, Scheduler, Sequence

LARGE = {"num_blocks": 500, "block_size": 4}


def planned(plan: Plan, *sequences: Sequence) -> list[int]:
    """Tokens of each of `sequences` in this step."""
    tokens = {row.seq: row.n for row in plan.rows}
    return [tokens.get(seq, 0) for seq in sequences]


@stage(5)
def test_a_prompt_and_a_decode_share_a_step() -> None:
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=2, budget=100))
    a, b = Sequence([1, 2, 3, 4], max_len=6), Sequence([5] * 10, max_len=11)
    scheduler.add(a)
    plan = scheduler.schedule()
    assert planned(plan, a) == [4], "the first step, of a prompt of 4 tokens"
    scheduler.update(plan, [9])
    scheduler.add(b)
    plan = scheduler.schedule()
    assert planned(plan, a, b) == [1, 10], "one decodes, and a prompt of 10 tokens has come"
    scheduler.update(plan, [9, 9])
    assert (a.finish_reason, b.finish_reason) == ("length", "length"), "max_len 6 and 11"
    assert not scheduler.running and not scheduler.schedule().rows, "both have ended"


@stage(5)
def test_the_budget_cuts_a_prompt() -> None:
    """No word about chunks is needed."""
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=2, budget=8))
    seq, steps = Sequence(list(range(20)), max_len=22), []
    scheduler.add(seq)
    while not seq.finish_reason:
        plan = scheduler.schedule()
        steps += planned(plan, seq)
        scheduler.update(plan, [9] * sum(row.catches_up for row in plan.rows))
    assert steps == [8, 8, 4, 1], "a prompt of 20 tokens and 2 of output, budget 8"


@stage(5)
def test_rows_of_one_token_come_first() -> None:
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=3, budget=100))
    a, b, c = Sequence([1, 2, 3]), Sequence([4]), Sequence([5, 6])
    for seq in (a, b, c):
        scheduler.add(seq)
    found = [row.seq for row in scheduler.schedule().rows]
    assert found == [b, a, c], "prompts of 3, 1 and 2 tokens"


@stage(5)
def test_the_eos_token_does_not_join() -> None:
    scheduler = Scheduler(Config(**LARGE))
    seq = Sequence([1, 2, 3], max_len=4, eos=frozenset([7]))
    scheduler.add(seq)
    scheduler.update(scheduler.schedule(), [7])
    assert seq.finish_reason == "stop", "the first token was EOS, and would have been the last"
    assert seq.token_ids == [1, 2, 3], "EOS is 7"


@stage(5)
def test_to_finish_is_possible_anywhere_and_twice() -> None:
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=1))
    runs, waits = Sequence([1, 2, 3]), Sequence([4, 5])
    scheduler.add(runs)
    scheduler.add(waits)
    scheduler.schedule()
    for seq in (runs, waits, runs):
        scheduler.finish(seq, "abort")
        assert (seq.finish_reason, seq.block_table) == ("abort", []), f"finish({seq})"
    assert not scheduler.running and not scheduler.waiting, "one ran and one waited"


@pytest.mark.parametrize("seed", range(40))
@stage(5)
def test_it_plans_what_the_engine_plans(seed: int) -> None:
    rng = random.Random(seed)
    max_num_seqs = rng.randint(1, 5)
    options = {"num_blocks": 500, "block_size": rng.randint(1, 4), "max_num_seqs": max_num_seqs}
    options["budget"] = max_num_seqs + rng.choice([0, 1, 5, 30])
    steps = sorted(rng.randint(0, 30) for _ in range(rng.randint(1, 12)))
    check_plans(
        options,
        [(at, [rng.randrange(2)] * rng.randint(1, 30), rng.randint(1, 12)) for at in steps],
    )
