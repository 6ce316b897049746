"""Stage 13: one step ahead, against nanoserve's scheduler one step ahead, and your own engine."""

import random
import threading
import time
from typing import Any

import pytest

from . import your_engine
from .compare import CHECKPOINT, CONFIG, by_engine, by_yours, workload
from .stages import QUESTION, check_plans, random_case, stage
from .your_engine import Config, Model, Plan, Sequence
from .your_features import PENDING, AsyncEngine, AsyncScheduler


def turn(scheduler: AsyncScheduler, before: Plan | None, tokens: list[int]) -> Plan:
    """One turn of the loop: plan, then the tokens of the step before, then commit."""
    plan = scheduler.schedule()
    if before is not None:
        scheduler.update(before, tokens)
    scheduler.commit(plan)
    return plan


def rows_of(plan: Plan, seq: Sequence) -> list[tuple[int, int]]:
    """Start and tokens of the rows of `seq`."""
    return [(row.start, row.n) for row in plan.rows if row.seq is seq]


@stage(13)
def test_the_next_step_is_planned_before_the_token_is_known() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=20, block_size=4))
    seq = Sequence([1, 2, 3], max_len=9)
    scheduler.add(seq)
    first = turn(scheduler, None, [])
    case = "Sequence([1, 2, 3], max_len=9)"
    assert seq.token_ids == [1, 2, 3, PENDING], f"{case} after commit: {seq.token_ids}"
    assert seq.num_computed == 3, f"{case} after commit: num_computed {seq.num_computed}"
    second = scheduler.schedule()
    found = rows_of(second, seq)
    assert found == [(3, 1)], f"(start, n) of {case} in the second step: {found}"
    scheduler.update(first, [7])
    assert seq.token_ids == [1, 2, 3, 7], f"{case} after update with [7]: {seq.token_ids}"
    scheduler.commit(second)
    assert seq.token_ids == [1, 2, 3, 7, PENDING], f"{case} after commit: {seq.token_ids}"
    found = seq.num_computed
    assert found == 4, f"{case} after two commits: num_computed {found}"


@stage(13)
def test_a_sequence_that_is_about_to_end_is_not_planned() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=20, block_size=4))
    seq = Sequence([1, 2, 3], max_len=4)
    scheduler.add(seq)
    first = turn(scheduler, None, [])
    second = turn(scheduler, first, [7])
    case = "Sequence([1, 2, 3], max_len=4), which ends with the token of the first step"
    assert rows_of(second, seq) == [], f"rows of the second step {rows_of(second, seq)}: {case}"
    assert seq.finish_reason == "length", f"reason {seq.finish_reason}: {case}"
    assert seq.token_ids == [1, 2, 3, 7], f"tokens {seq.token_ids}: {case}"


@stage(13)
def test_the_token_after_the_end_is_discarded() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=20, block_size=4))
    seq = Sequence([1, 2, 3], max_len=9, eos=frozenset([5]))
    scheduler.add(seq)
    first = turn(scheduler, None, [])
    second = turn(scheduler, first, [5])
    case = "Sequence([1, 2, 3], max_len=9), EOS is 5; the first step yields 5, the second 6"
    assert rows_of(second, seq) == [(3, 1)], f"the second step has a row for it: {case}"
    found = (seq.token_ids, seq.finish_reason, seq.block_table)
    assert found == ([1, 2, 3], "stop", []), f"tokens, reason, blocks {found}: {case}"
    third = turn(scheduler, second, [6])
    found = (seq.token_ids, seq.finish_reason, seq.block_table)
    assert found == ([1, 2, 3], "stop", []), f"tokens, reason, blocks at last {found}: {case}"
    assert third.rows == [], f"rows of the third step {third.rows}: {case}"


@stage(13)
def test_a_block_is_cached_when_its_last_token_is_known() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=20, block_size=4, max_num_seqs=2))
    seq = Sequence([1, 2, 3], max_len=20)
    scheduler.add(seq)
    first = turn(scheduler, None, [])
    second = scheduler.schedule()
    case = "[1, 2, 3] runs, blocks of 4; the token of the first step is 7"
    found = (seq.num_cached, seq.hashes)
    assert found == (0, []), f"{case}: num_cached and hashes before it is known {found}"
    scheduler.update(first, [7])
    scheduler.commit(second)
    found = scheduler.blocks.lookup(Sequence([1, 2, 3, 7, 8]))
    assert found == seq.block_table[:1], f"{case}: lookup of [1, 2, 3, 7, 8] gives {found}"
    found = scheduler.blocks.lookup(Sequence([1, 2, 3, PENDING, 8]))
    assert found == [], f"{case}: lookup of [1, 2, 3, PENDING, 8] gives {found}"


@stage(13)
def test_a_victim_gets_the_token_that_it_still_awaits() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=3, block_size=4))
    a, b = Sequence([1] * 4, max_len=12), Sequence([2] * 8, max_len=12)
    scheduler.add(a)
    scheduler.add(b)
    first = turn(scheduler, None, [])
    second = scheduler.schedule()
    case = (
        "a has 4 and b 8 tokens of prompt, in three blocks of 4: b is preempted in the second step"
    )
    assert second.preempted == [b], f"preempted {second.preempted}: {case}"
    assert b.token_ids == [2] * 8, f"tokens of b {b.token_ids}: {case}"
    scheduler.update(first, [7, 9])
    found = (b.token_ids, b.num_computed, b.block_table)
    right = ([2] * 8 + [9], 0, [])
    assert found == right, f"tokens, num_computed and blocks of b when its 9 came {found}: {case}"
    assert list(scheduler.waiting) == [b], f"waiting {scheduler.waiting}: {case}"
    scheduler.commit(second)
    found = (b.token_ids, b.num_computed)
    assert found == ([2] * 8 + [9], 0), f"after commit {found}: {case}"


@stage(13)
def test_a_victim_may_end_while_it_waits() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=3, block_size=4))
    a, b = Sequence([1] * 4, max_len=12), Sequence([2] * 8, max_len=12, eos=frozenset([5]))
    scheduler.add(a)
    scheduler.add(b)
    first = turn(scheduler, None, [])
    turn(scheduler, first, [7, 5])
    case = "b is preempted in the second step, and the token that it awaits is EOS"
    assert b.finish_reason == "stop", f"reason {b.finish_reason}: {case}"
    assert list(scheduler.waiting) == [], f"waiting {scheduler.waiting}: {case}"


@stage(13)
def test_finish_leaves_no_pending_token() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=20, block_size=4))
    seq = Sequence([1, 2, 3], max_len=9)
    scheduler.add(seq)
    first = turn(scheduler, None, [])
    scheduler.finish(seq, "abort")
    case = "Sequence([1, 2, 3]) aborted while its first step is in flight"
    assert seq.token_ids == [1, 2, 3], f"tokens {seq.token_ids}: {case}"
    turn(scheduler, first, [7])
    found = (seq.token_ids, seq.finish_reason, seq.block_table, scheduler.running)
    assert found == ([1, 2, 3], "abort", [], []), f"when its token came {found}: {case}"


@stage(13)
def test_a_chunk_has_no_pending_token() -> None:
    scheduler = AsyncScheduler(Config(num_blocks=20, block_size=4, budget=5))
    seq, before, found = Sequence([1] * 12, max_len=14), None, []
    scheduler.add(seq)
    for _ in range(5):
        before = turn(
            scheduler, before, [7] * sum(r.catches_up for r in before.rows) if before else []
        )
        found.append(rows_of(before, seq))
    case = "a prompt of 12 tokens and 2 of output, budget 5: (start, n) in five steps"
    assert found == [[(0, 5)], [(5, 5)], [(10, 2)], [(12, 1)], []], f"{found}: {case}"
    assert seq.token_ids == [1] * 12 + [7, 7], f"tokens {seq.token_ids}: {case}"


@pytest.mark.parametrize("seed", range(60))
@stage(13)
def test_it_plans_what_the_engine_plans_one_step_ahead(seed: int) -> None:
    """The first cases are the smallest."""
    options, arrivals = random_case(random.Random(seed), 1 + seed // 4, min(30, 10 + seed))
    check_plans(options, arrivals, 40, is_async=True)


@stage(13)
def test_a_step_is_planned_while_the_model_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(CHECKPOINT, Config(num_blocks=40, block_size=4))
    planned, in_time = threading.Semaphore(0), []
    schedule, forward = engine.scheduler.schedule, Model.forward

    def counted() -> Plan:
        plan = schedule()
        planned.release()
        return plan

    def waits(self: Model, *args: Any) -> Any:
        # One permit of its own plan, and one of the next: 5 s are the time to give up.
        in_time.append(planned.acquire(timeout=5) and planned.acquire(timeout=5))
        planned.release()
        return forward(self, *args)

    engine.scheduler.schedule = counted
    monkeypatch.setattr(Model, "forward", waits)
    seq = engine.add([5, 6, 7], max_tokens=2)
    case = "add([5, 6, 7], max_tokens=2), and a model that waits until the next step is planned"
    for _ in range(5):
        engine.step()
        if seq.finish_reason or not all(in_time):
            break
    assert in_time and all(in_time), f"planned in time: {in_time}; {case}"
    assert seq.finish_reason, f"not finished after 5 steps; {case}"


def late(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the model take longer: the loop is done with the next plan when it begins."""
    forward = Model.forward

    def slow(self: Model, *args: Any) -> Any:
        time.sleep(seconds)
        return forward(self, *args)

    monkeypatch.setattr(Model, "forward", slow)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seconds", [0.0, 0.004])
@stage(13)
def test_tokens_and_texts_are_those_without_it(
    sampled: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = workload(50 if not seconds else 25, 0, sampled)
    right = by_yours(your_engine, requests)
    late(monkeypatch, seconds)
    found = by_engine(AsyncEngine(CHECKPOINT, Config(**CONFIG)), requests)
    preempted = sum(len(step.preempted) for step in found.steps)
    case = f"workload({len(requests)}, 0, {sampled}), a model that waits {seconds} s, then computes"
    assert preempted > 3, f"only {preempted} preemptions: {case}"
    for name in ("tokens", "reasons", "texts"):
        yours, alone = getattr(found, name), getattr(right, name)
        for i, request in enumerate(requests):
            assert yours[i] == alone[i], (
                f"{name} of {request}: {yours[i]}, without async scheduling {alone[i]}; {case}"
            )


@stage(13)
def test_the_pieces_come_one_call_later() -> None:
    engine = AsyncEngine(CHECKPOINT, Config(num_blocks=40, block_size=4))
    seq = engine.add(QUESTION, max_tokens=3)
    found = [list(engine.step()) == [seq] for _ in range(5)]
    case = f"add({QUESTION!r}, max_tokens=3): whether the calls of step returned a piece"
    assert found == [False, True, True, True, False], f"{found}; {case}"
    assert engine.step() == {}, f"then nothing is left; {case}"


@stage(13)
def test_chat_works_as_before() -> None:
    engine = AsyncEngine(CHECKPOINT, Config(num_blocks=80, block_size=4))
    text = "".join(engine.chat("What is a KV cache?"))
    right = "The KV cache keeps the keys and values of all earlier tokens"
    assert text.startswith(right), f"chat('What is a KV cache?') gave {text!r}"


@stage(13)
def test_an_abort_between_two_steps_leaves_nothing() -> None:
    engine = AsyncEngine(CHECKPOINT, Config(num_blocks=40, block_size=4))
    first = engine.add(QUESTION)
    for _ in range(3):
        engine.step()
    engine.abort(first)
    case = f"abort of {QUESTION!r} after 3 steps"
    tokens = len(first.token_ids) - first.num_prompt
    found = (first.finish_reason, first.block_table, tokens)
    assert found == ("abort", [], 2), f"reason, blocks and new tokens {found}: {case}"
    second = engine.add([5, 6, 7], max_tokens=5)
    pieces = [engine.step() for _ in range(8)]
    assert all(first not in each for each in pieces), f"it got text: {case}"
    assert second.finish_reason, f"the next request ended with {second.finish_reason}: {case}"
    tokens = len(first.token_ids) - first.num_prompt
    assert tokens == 2, f"{tokens} new tokens at last: {case}"
    alone = your_engine.Engine(CHECKPOINT, Config(num_blocks=40, block_size=4))
    right = alone.add([5, 6, 7], max_tokens=5)
    while not right.finish_reason:
        alone.step()
    assert second.token_ids == right.token_ids, f"the next request, [5, 6, 7]: {case}"
