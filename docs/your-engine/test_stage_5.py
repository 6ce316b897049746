"""Stage 5: the scheduler, in a pool that is large enough."""

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
    assert (a.finish_reason, b.finish_reason) == ("length", "length"), (
        "prompts of 4 and 10 tokens with max_len 6 and 11, after 2 tokens and 1"
    )
    assert not scheduler.running and not scheduler.schedule().rows, (
        "both have ended, and no row is left to plan"
    )


@stage(5)
def test_the_budget_cuts_a_prompt() -> None:
    """Chunks need no code of their own."""
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=2, budget=8))
    seq, steps = Sequence(list(range(20)), max_len=22), []
    scheduler.add(seq)
    while not seq.finish_reason and len(steps) < 100:
        plan = scheduler.schedule()
        steps += planned(plan, seq)
        scheduler.update(plan, [9] * sum(row.catches_up for row in plan.rows))
    assert steps == [8, 8, 4, 1], "a prompt of 20 tokens and 2 of output, budget 8"


@stage(5)
def test_a_block_is_cached_when_a_step_fills_it() -> None:
    """Not when it is allocated: an equal prompt would read K and V that are not computed."""
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=2, budget=8))
    seq, twin = Sequence(list(range(20)), max_len=22), Sequence(list(range(20)))
    scheduler.add(seq)
    for step, num_blocks in enumerate((2, 4, 4)):  # the last token is never a hit
        plan = scheduler.schedule()
        found, right = scheduler.blocks.lookup(twin), seq.block_table[:num_blocks]
        case = f"lookup of range(20) in step {step} of a prompt of range(20), budget 8"
        assert found == right, f"{case}: its block table is {seq.block_table}"
        scheduler.update(plan, [9] * sum(row.catches_up for row in plan.rows))


@stage(5)
def test_rows_of_one_token_come_first() -> None:
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=3, budget=100))
    prompts = [[1, 2, 3], [4], [5, 6]]
    for prompt in prompts:
        scheduler.add(Sequence(list(prompt)))
    found = [row.seq.token_ids for row in scheduler.schedule().rows]
    assert found == [[4], [1, 2, 3], [5, 6]], f"the rows of the first step, prompts {prompts}"


@stage(5)
def test_the_eos_token_is_not_appended() -> None:
    scheduler = Scheduler(Config(**LARGE))
    seq = Sequence([1, 2, 3], max_len=4, eos=frozenset([7]))
    scheduler.add(seq)
    scheduler.update(scheduler.schedule(), [7])
    assert seq.finish_reason == "stop", "the first token was EOS, and would have been the last"
    assert seq.token_ids == [1, 2, 3], "EOS is 7, and the first token after [1, 2, 3] was 7"


@stage(5)
def test_finish_works_in_any_state_and_twice() -> None:
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=1))
    runs, waits = Sequence([1, 2, 3]), Sequence([4, 5])
    scheduler.add(runs)
    scheduler.add(waits)
    scheduler.schedule()
    calls = []
    for name, seq, reason in (
        ("runs", runs, "abort"),
        ("waits", waits, "abort"),
        ("runs", runs, "stop"),
    ):
        calls.append(f"finish({name}, {reason!r})")
        scheduler.finish(seq, reason)
        found = seq.finish_reason, seq.block_table
        assert found == (reason, []), f"reason and blocks {found} after {', '.join(calls)}"
    assert not scheduler.running and not scheduler.waiting, ", ".join(calls)


@stage(5)
def test_a_sequence_with_a_stop_string_keeps_the_token() -> None:
    """`is_stopped` is called after each appended token, before the length is checked."""
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=2))
    seq = Sequence([1, 2], max_len=4, is_stopped=lambda seq: seq.token_ids[-1] == 9)
    scheduler.add(seq)
    scheduler.update(scheduler.schedule(), [8])
    assert seq.finish_reason is None, "`is_stopped` is True for 9, and 8 came"
    scheduler.update(scheduler.schedule(), [9])
    case = "stopped at 9, which came and was the last of max_len 4"
    assert (seq.finish_reason, seq.token_ids, seq.block_table) == ("stop", [1, 2, 8, 9], []), case


@stage(5)
def test_a_finished_sequence_only_gets_another_reason() -> None:
    """Such as one that is aborted in the step in which it has ended by its length."""
    scheduler = Scheduler(Config(**LARGE, max_num_seqs=2))
    ends, stays = Sequence([1, 2, 3], max_len=4), Sequence([4, 5])
    scheduler.add(ends)
    scheduler.add(stays)
    scheduler.update(scheduler.schedule(), [9, 9])
    assert ends.finish_reason == "length", "a prompt of 3 tokens and one of output, max_len 4"
    table = list(stays.block_table)
    scheduler.finish(ends, "stop")
    case = "finish(seq, 'stop') of a sequence that has ended by its length"
    assert ends.finish_reason == "stop", case
    assert ends.token_ids == [1, 2, 3, 9], case
    assert stays.finish_reason is None and stays.block_table == table, f"{case}: the other one"
    plan = scheduler.schedule()
    assert planned(plan, ends, stays) == [0, 1], f"{case}: the next step, of both"


@pytest.mark.parametrize("seed", range(40))
@stage(5)
def test_it_plans_what_the_engine_plans(seed: int) -> None:
    """The first cases are the smallest."""
    rng, num_requests = random.Random(seed), 1 + seed * 3 // 10
    max_num_seqs = rng.randint(1, 5)
    options = {"num_blocks": 500, "block_size": rng.randint(1, 4), "max_num_seqs": max_num_seqs}
    options["budget"] = max_num_seqs + rng.choice([0, 1, 5, 30])
    steps = sorted(rng.randint(0, 3 * num_requests) for _ in range(num_requests))
    longest = min(30, 6 * num_requests)
    check_plans(
        options,
        [(at, [rng.randrange(2)] * rng.randint(1, longest), rng.randint(1, 12)) for at in steps],
    )
