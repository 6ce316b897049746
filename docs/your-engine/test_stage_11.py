"""Stage 11: a scheduler with a policy, against nanoserve's with the same order."""

import random
from itertools import accumulate

import pytest

from .compare import CHECKPOINT, CONFIG, by_engine, by_yours, workload
from .stages import check_plans, random_case, stage
from .your_engine import Config, Engine, Plan, Row, Sequence
from .your_features import PolicyScheduler, shortest_first


def scheduler_of(aging: int = 0, **options: int) -> PolicyScheduler:
    return PolicyScheduler(
        Config(**{"block_size": 4, "budget": 64} | options), shortest_first(aging)
    )


def named(sequences: list[Sequence], **names: Sequence) -> list[str]:
    """Names of sequences, for messages."""
    by_sequence = {seq: name for name, seq in names.items()}
    return [by_sequence[seq] for seq in sequences]


@stage(11)
def test_the_order_of_remaining_work_and_arrival() -> None:
    fields = {"max_len": 50, "num_computed": 20, "arrival": 7}
    case = f"of Sequence([1] * 30, {fields})"
    for aging, right in ((0, (30, 7)), (1, (37, 7)), (10, (100, 7))):
        found = shortest_first(aging)(Sequence([1] * 30, **fields))
        assert tuple(found) == right, (
            f"shortest_first({aging}) {case}: yours {found}, right {right}"
        )


@stage(11)
def test_waiting_sequences_are_in_the_order_of_the_policy() -> None:
    scheduler = scheduler_of()
    a, b, c, d = (Sequence([1], max_len=n) for n in (30, 10, 40, 10))
    for seq in (a, b, c, d):
        scheduler.add(seq)
    found = named([*scheduler.waiting], a=a, b=b, c=c, d=d)
    case = "max_len of a, b, c and d, in order of arrival: 30, 10, 40, 10; aging 0"
    assert found == ["b", "d", "a", "c"], f"waiting: {found}; {case}"
    arrivals = [seq.arrival for seq in (a, b, c, d)]
    assert arrivals == [1, 2, 3, 4], f"arrival of each: {arrivals}; {case}"
    row = scheduler.schedule().rows[0]
    assert row.seq in (b, d), f"the first row is of {named([row.seq], a=a, b=b, c=c, d=d)}; {case}"


@stage(11)
def test_a_removed_row_gives_its_tokens_back() -> None:
    scheduler = scheduler_of(num_blocks=3)
    a, b = Sequence([1] * 4, max_len=8), Sequence([2] * 8, max_len=80)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    plan = Plan(50, [Row(b, 8, 7, False)])
    scheduler.make_room(a, 1, plan)
    case = "make_room(a, 1, plan): a row of 7 tokens is planned for b, which has more to do than a"
    found = named([*scheduler.waiting], a=a, b=b)
    assert found == ["b"], f"waiting: {found}, right ['b']; {case}"
    rows = [(named([row.seq], a=a, b=b)[0], row.n) for row in plan.rows]
    left = rows, plan.budget
    assert left == ([], 57), f"rows and budget: {left}, right ([], 57); {case}, and is preempted"


@stage(11)
def test_the_longest_running_sequence_is_preempted() -> None:
    """It has come first, and its row is planned already when the other needs a block."""
    scheduler = scheduler_of(num_blocks=3, budget=6)
    long, short = Sequence([1] * 3, max_len=90), Sequence([2] * 4, max_len=9)
    scheduler.add(long)
    scheduler.update(scheduler.schedule(), [9])
    scheduler.add(short)
    scheduler.update(scheduler.schedule(), [9, 9])
    case = "long has 3 and short 4 tokens of prompt, in three blocks of 4"
    found, step = [], 0
    while not found and step < 4:
        plan, step = scheduler.schedule(), step + 1
        found = named(plan.preempted, long=long, short=short)
        if not found:
            scheduler.update(plan, [9] * len(plan.rows))
    assert found == ["long"], f"preempted in {step} more steps: {found}; {case}"
    rows = [(named([row.seq], long=long, short=short)[0], row.n) for row in plan.rows]
    assert rows == [("short", 1)], f"rows of the step in which long was preempted: {rows}; {case}"
    assert plan.budget == 5, f"budget 6, one token is planned, {plan.budget} are left; {case}"
    left = (long.block_table, long.num_computed, long.finish_reason)
    assert left == ([], 0, None), f"block_table, num_computed, finish_reason of long: {left}"
    found = named([*scheduler.waiting], long=long, short=short)
    assert found == ["long"], f"waiting: {found}; {case}"


@stage(11)
def test_a_victim_returns_to_its_place_and_not_to_the_head() -> None:
    scheduler = scheduler_of(num_blocks=2, max_num_seqs=2)
    a, b, c = (Sequence([i] * 4, max_len=n) for i, n in ((1, 8), (2, 20), (3, 10)))
    for seq in (a, b):
        scheduler.add(seq)
    scheduler.update(scheduler.schedule(), [9, 9])
    scheduler.add(c)
    plan = scheduler.schedule()
    case = "max_len of a, b and c: 8, 20, 10; two blocks of 4, both of a and b need another one"
    found = named(plan.preempted, a=a, b=b, c=c)
    assert found == ["b"], f"preempted: {found}; {case}"
    found = named([*scheduler.waiting], a=a, b=b, c=c)
    assert found == ["c", "b"], f"waiting: {found}; {case}"


@stage(11)
def test_the_victim_may_be_the_sequence_that_needs_the_block() -> None:
    scheduler = scheduler_of(num_blocks=2)
    a, b = Sequence([1] * 2, max_len=8), Sequence([2] * 4, max_len=80)
    scheduler.add(a)
    scheduler.add(b)
    scheduler.update(scheduler.schedule(), [9, 9])
    plan = Plan(64)
    found = scheduler.make_room(b, 1, plan)
    case = "make_room(b, 1, plan): a has 2 and b 4 tokens of prompt, in two blocks of 4"
    assert not found, f"{case}; it returned {found}"
    found = named(plan.preempted, a=a, b=b)
    assert found == ["b"], f"preempted: {found}; {case}"


def steps_until_it_runs(aging: int, remaining: int, num_steps: int) -> int | None:
    """Steps that a long sequence waits, if one short sequence arrives in each; None: it starved."""
    scheduler = scheduler_of(aging, num_blocks=100, max_num_seqs=1)
    scheduler.add(Sequence([3] * 4, max_len=6))
    long = Sequence([1] * 2, max_len=remaining)
    scheduler.add(long)
    for step in range(num_steps):
        scheduler.add(Sequence([2] * 2, max_len=3))
        plan = scheduler.schedule()
        if any(row.seq is long for row in plan.rows):
            return step
        scheduler.update(plan, [9] * len(plan.rows))
    return None


@pytest.mark.parametrize(("aging", "remaining"), [(1, 30), (2, 30), (5, 60)])
@stage(11)
def test_no_sequence_starves(aging: int, remaining: int) -> None:
    """The bound of the docstring: (remaining - 3) / aging short ones may pass, and no more."""
    bound = (remaining - 3) // aging + 3  # and what runs, or arrived, before it
    found = steps_until_it_runs(aging, remaining, 200)
    case = f"max_len {remaining}, aging {aging}; one of max_len 3 arrives and ends in each step"
    assert found is not None, f"it never ran in 200 steps: {case}"
    assert found <= bound, f"it ran after {found} steps, at most {bound} are right: {case}"
    starved = steps_until_it_runs(0, remaining, 200)
    assert starved is None, (
        f"it ran after {starved} steps, although short ones come first: {case[:9]}"
    )


@stage(11)
def test_the_mean_time_is_shorter() -> None:
    """Why one does this: few wait for a long one, where many waited."""
    means = []
    lengths = [40, 6, 30, 4, 8, 50, 5, 7]
    for aging in (10**6, 0):  # the first is first come, first served
        scheduler = scheduler_of(aging, num_blocks=100, max_num_seqs=1)
        sequences = [Sequence([i, 1], max_len=n) for i, n in enumerate(lengths)]
        for seq in sequences:
            scheduler.add(seq)
        ends, step = {}, 0
        while len(ends) < len(sequences) and step < 1000:
            plan, step = scheduler.schedule(), step + 1
            scheduler.update(plan, [9] * len(plan.rows))
            ends |= {seq: step for seq in sequences if seq.finish_reason and seq not in ends}
        means.append(sum(ends.values()) / len(sequences))
    case = f"max_len {lengths}, one at a time"
    # The first step computes both tokens of a prompt, and yields one of output.
    orders = lengths, sorted(lengths)
    right = [sum(accumulate(n - 2 for n in order)) / len(lengths) for order in orders]
    assert means == right, f"mean steps with aging 10**6 and 0: {means}, right {right}; {case}"


@pytest.mark.parametrize("seed", range(40))
@stage(11)
def test_it_plans_what_the_engine_plans_with_this_order(seed: int) -> None:
    """The first cases are the smallest."""
    rng = random.Random(seed)
    options, arrivals = random_case(rng, 2 + seed // 3, min(30, 10 + seed))
    check_plans(options, arrivals, 40, aging=rng.choice([0, 1, 3]))


@pytest.mark.parametrize("aging", [0, 2])
@stage(11)
def test_a_policy_changes_no_token(aging: int) -> None:
    from . import your_engine

    requests = workload(30, seed=2)
    engine = Engine(CHECKPOINT, Config(**CONFIG))
    engine.scheduler = PolicyScheduler(Config(**CONFIG), shortest_first(aging))
    found, right = by_engine(engine, requests), by_yours(your_engine, requests)
    case = f"workload(30, seed=2), aging {aging}, and first come, first served"
    assert found.steps != right.steps, f"the steps should differ: {case}"
    for i, request in enumerate(requests):
        assert found.tokens[i] == right.tokens[i], f"the tokens of {request}: {case}"
        assert found.texts[i] == right.texts[i], f"the text of {request}: {case}"
