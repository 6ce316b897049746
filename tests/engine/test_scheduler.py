"""Who runs when. W9 is the course's worked example of chunked prefill and mixed batches."""

import pytest

from nanoserve.config import EngineConfig
from nanoserve.engine.invariants import check_invariants
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.sampling_params import SamplingParams


def make_scheduler(num_kv_blocks: int = 1000, max_model_len: int = 4096, **options) -> Scheduler:
    options = {"max_num_seqs": 8, "enable_prefix_caching": False, **options}
    return Scheduler(EngineConfig(model="none", **options), num_kv_blocks, max_model_len)


class Requests:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.count = 0

    def add(self, length: int, max_tokens: int | None = None, priority: int = 0) -> Sequence:
        self.count += 1
        seq = Sequence(
            str(self.count),
            [self.count] * length,
            SamplingParams(max_tokens=max_tokens),
            max_model_len=4096,
            arrival=self.count,
            priority=priority,
        )
        self.scheduler.add(seq)
        return seq


def planned(scheduler: Scheduler) -> Plan:
    plan = Plan()
    scheduler.schedule(plan)
    return plan


def step(scheduler: Scheduler) -> dict[Sequence, int]:
    plan = planned(scheduler)
    scheduler.update(plan, [7 for _ in plan.caught_up()])
    check_invariants(scheduler)
    return plan.num_new_tokens


def decoding(requests: Requests, count: int) -> list[Sequence]:
    sequences = [requests.add(1) for _ in range(count)]
    step(requests.scheduler)
    return sequences


def test_w9a_a_long_prompt_is_cut_at_the_threshold() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=256)
    seq = Requests(scheduler).add(1000)
    chunks = [step(scheduler)[seq] for _ in range(4)]
    assert chunks == [256, 256, 256, 232]
    assert seq.num_tokens == 1001  # no token before the last chunk, one after it


def test_w9b_decodes_share_the_steps_of_a_chunked_prefill() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=256)
    requests = Requests(scheduler)
    decoding(requests, 3)
    requests.add(1000)
    assert sum(step(scheduler).values()) == 256 + 3
    e = requests.add(50)
    plan = step(scheduler)
    assert sum(plan.values()) == 256 + 3 + 50 and plan[e] == 50
    assert sum(step(scheduler).values()) == 256 + 4


def test_w9c_prefill_and_decode_in_one_batch() -> None:
    scheduler = make_scheduler()
    requests = Requests(scheduler)
    b, c = decoding(requests, 2)
    a = requests.add(100)
    assert step(scheduler) == {b: 1, c: 1, a: 100}
    d = requests.add(50)
    assert step(scheduler) == {b: 1, c: 1, a: 1, d: 50}


def test_the_budget_cuts_a_prompt_and_decodes_go_first() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    requests = Requests(scheduler)
    (b,) = decoding(requests, 1)
    a = requests.add(40)
    assert [step(scheduler).get(a) for _ in range(3)] == [15, 15, 10]
    assert b.num_tokens == 5


def test_max_num_seqs_bounds_the_running_set() -> None:
    scheduler = make_scheduler(max_num_seqs=4)
    requests = Requests(scheduler)
    sequences = [requests.add(3, max_tokens=4) for _ in range(32)]
    while scheduler.has_unfinished():
        step(scheduler)
        assert len(scheduler.running) <= 4
    finished_in = [seq.metrics.finished_time for seq in sequences]
    assert finished_in == sorted(finished_in)  # nobody starves behind later arrivals


def test_fcfs_preempts_the_last_of_running_and_puts_it_at_the_head() -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=96)
    requests = Requests(scheduler)
    a, b, c = requests.add(32), requests.add(32), requests.add(16)
    step(scheduler)
    assert scheduler.running == [a, b, c]
    waiting = requests.add(16)
    plan = planned(scheduler)  # a and b need a third block, and one is left
    assert plan.preempted == [c] and list(plan.num_new_tokens) == [a, b]
    assert list(scheduler.waiting) == [c, waiting]  # and nothing is admitted in this step
    assert c.status is SequenceStatus.WAITING and c.num_computed_tokens == 0
    assert c.slot == -1 and c.num_tokens == 17  # its sampled token is kept
    check_invariants(scheduler)


def test_priority_preempts_the_least_urgent_even_if_it_was_planned_already() -> None:
    scheduler = make_scheduler(num_kv_blocks=4, max_model_len=64, scheduling_policy="priority")
    requests = Requests(scheduler)
    low, high = requests.add(31, priority=5), requests.add(32, priority=1)
    step(scheduler)
    plan = planned(scheduler)
    assert plan.preempted == [low] and plan.num_new_tokens == {high: 1}
    scheduler.update(plan, [7])
    check_invariants(scheduler)


def test_priority_orders_waiting_by_value_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    requests = Requests(scheduler)
    sequences = [requests.add(2, max_tokens=1, priority=p) for p in (2, 0, 1, 0)]
    order = []
    while scheduler.has_unfinished():
        order += step(scheduler)
    assert order == [sequences[i] for i in (1, 3, 2, 0)]


def test_fcfs_ignores_priority() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    requests = Requests(scheduler)
    sequences = [requests.add(2, max_tokens=1, priority=p) for p in (2, 0, 1)]
    order = []
    while scheduler.has_unfinished():
        order += step(scheduler)
    assert order == sequences


def test_same_step_requests_share_a_prefix() -> None:
    scheduler = make_scheduler(enable_prefix_caching=True)
    a, b = (
        Sequence(str(i), [5] * 40, SamplingParams(), max_model_len=4096, arrival=i) for i in (1, 2)
    )
    scheduler.add(a)
    scheduler.add(b)
    assert list(planned(scheduler).num_new_tokens.values()) == [40, 8]
    assert a.block_table[:2] == b.block_table[:2]


def test_a_chunk_does_not_offer_what_it_has_not_computed() -> None:
    scheduler = make_scheduler(
        enable_prefix_caching=True, long_prefill_token_threshold=20, max_num_batched_tokens=100
    )
    for i in (1, 2):
        scheduler.add(Sequence(str(i), [5] * 64, SamplingParams(), max_model_len=4096, arrival=i))
    planned(scheduler)
    assert [seq.num_computed_tokens for seq in scheduler.running] == [0, 16]


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "finished"])
def test_abort_in_any_state_frees_everything(state: str) -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=96, max_num_batched_tokens=48)
    requests = Requests(scheduler)
    if state == "preempted":
        others = [requests.add(32), requests.add(16)]
        step(scheduler)
        seq = requests.add(16)
        step(scheduler)
        assert seq.status is SequenceStatus.RUNNING
        for _ in range(16):
            step(scheduler)
        assert seq.status is SequenceStatus.WAITING and seq.metrics.num_preemptions == 1
    else:
        others = []
        seq = requests.add(
            {"prefilling": 80}.get(state, 20), max_tokens=1 if state == "finished" else 9
        )
        if state != "waiting":
            step(scheduler)
    scheduler.finish(seq, "abort")
    scheduler.finish(seq, "abort")  # twice is once
    for other in others:
        scheduler.finish(other, "abort")
    check_invariants(scheduler)
    assert not scheduler.has_unfinished()
    assert scheduler.block_manager.num_free_blocks == 6
    assert seq.finish_reason == ("length" if state == "finished" else "abort")


def test_a_step_that_raised_is_undone() -> None:
    scheduler = make_scheduler(enable_prefix_caching=True)
    requests = Requests(scheduler)
    a, b = requests.add(40), requests.add(20)
    plan = planned(scheduler)
    scheduler.rollback(plan)
    check_invariants(scheduler)
    assert list(scheduler.waiting) == [a, b] and not scheduler.running
    assert scheduler.block_manager.lookup(a) == []  # nothing was computed, nothing is offered
    assert step(scheduler) == {a: 40, b: 20}


def test_an_empty_plan_has_no_rows() -> None:
    assert list(Plan().caught_up()) == []


def test_a_prompt_is_admitted_when_all_of_it_fits() -> None:
    """Admitted on its first chunk, it would be preempted and computed again, over and over."""
    scheduler = make_scheduler(num_kv_blocks=12, max_model_len=192, max_num_batched_tokens=32)
    requests = Requests(scheduler)
    running = requests.add(40, max_tokens=40)
    for _ in range(3):
        step(scheduler)
    long = requests.add(160, max_tokens=2)
    computed = 0
    while scheduler.has_unfinished():
        computed += step(scheduler).get(long, 0)
    assert running.finished and long.metrics.num_preemptions == 0
    assert computed == 160 + 1


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_a_sequence_has_a_block_for_every_token_of_a_step(block_size: int) -> None:
    scheduler = make_scheduler(block_size=block_size)
    seq = Requests(scheduler).add(3)
    for _ in range(8):
        plan = planned(scheduler)
        assert len(seq.block_table) == scheduler.block_manager.blocks_needed(seq.num_tokens)
        scheduler.update(plan, [7])
