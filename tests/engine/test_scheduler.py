"""Who runs when. W9 is the course's worked example of chunked prefill and mixed batches."""

import pytest

from nanoserve.config import EngineConfig
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import SIBLING, Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.sampling_params import SamplingParams


def make_scheduler(num_kv_blocks: int = 1000, max_model_len: int = 4096, **options) -> Scheduler:
    options = {"max_num_seqs": 8, "enable_prefix_caching": False, **options}
    config = EngineConfig(model="none", **options).for_device("cpu")
    return Scheduler(config, num_kv_blocks, max_model_len)


class Requests:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.count = 0

    def add(
        self, length: int, max_tokens: int | None = None, priority: int = 0, n: int = 1
    ) -> Sequence:
        """The first of `n` sequences that have the same prompt."""
        sequences = []
        for index in range(n):
            self.count += 1
            seq = Sequence(
                str(self.count - index),
                [self.count - index] * length,
                SamplingParams(n=n, max_tokens=max_tokens),
                max_model_len=4096,
                arrival=self.count,
                priority=priority,
                index=index,
            )
            sequences.append(seq)
        sequences[0].siblings = sequences[1:]
        self.scheduler.add(sequences[0])
        return sequences[0]


def end(scheduler: Scheduler, plan: Plan) -> list[int]:
    """What follows `schedule` if nothing goes wrong."""
    scheduler.commit(plan)
    scheduler.check()
    joined = scheduler.update(plan, [[7] for _ in plan.sampled])
    scheduler.check()
    return joined


def counts(plan: Plan) -> dict[Sequence, int]:
    return {row.seq: row.n for row in plan.rows}


def step(scheduler: Scheduler) -> dict[Sequence, int]:
    plan = scheduler.schedule()
    end(scheduler, plan)
    return counts(plan)


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
    finished: list[Sequence] = []
    while scheduler.has_unfinished():
        step(scheduler)
        assert len(scheduler.running) <= 4
        finished += [seq for seq in sequences if seq.finished and seq not in finished]
    assert finished == sequences  # nobody starves behind later arrivals


def test_fcfs_preempts_the_last_of_running_and_puts_it_at_the_head() -> None:
    scheduler = make_scheduler(num_kv_blocks=6, max_model_len=96)
    requests = Requests(scheduler)
    a, b, c = requests.add(32), requests.add(32), requests.add(16)
    step(scheduler)
    assert scheduler.running == [a, b, c]
    waiting = requests.add(16)
    plan = scheduler.schedule()  # a and b need a third block, and one is left
    assert plan.preempted == [c] and list(counts(plan)) == [a, b]
    assert list(scheduler.waiting) == [c, waiting]  # and nothing is admitted in this step
    assert c.status is SequenceStatus.WAITING and c.num_computed_tokens == 0
    assert c.slot == -1 and c.num_tokens == 17  # its sampled token is kept
    scheduler.check()


def test_priority_preempts_the_least_urgent_even_if_it_was_planned_already() -> None:
    scheduler = make_scheduler(num_kv_blocks=4, max_model_len=64, scheduling_policy="priority")
    requests = Requests(scheduler)
    low, high = requests.add(31, priority=5), requests.add(32, priority=1)
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.preempted == [low] and counts(plan) == {high: 1}
    end(scheduler, plan)


def test_priority_orders_waiting_by_value_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    requests = Requests(scheduler)
    sequences = [requests.add(2, max_tokens=1, priority=p) for p in (2, 0, 1, 0)]
    order = []
    while scheduler.has_unfinished():
        order += step(scheduler)
    assert order == [sequences[i] for i in (1, 3, 2, 0)]


def serve_one_among_urgent(aging: int | None, num_urgent: int = 60) -> int | None:
    """A request of priority 1, and each step another of priority 0: how many go before it?"""
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority", priority_aging=aging)
    requests = Requests(scheduler)
    requests.add(2, max_tokens=1)
    patient = requests.add(2, max_tokens=1, priority=1)
    for num_before in range(num_urgent):
        requests.add(2, max_tokens=1)
        if patient in step(scheduler):
            return num_before
    return None


def test_urgent_requests_starve_all_others() -> None:
    assert serve_one_among_urgent(aging=None) is None


@pytest.mark.parametrize("aging", [1, 5, 20])
def test_with_priority_aging_a_level_outweighs_so_many_later_arrivals(aging: int) -> None:
    # One was there before it, and of those that come later so many go first. At equal rank the
    # earlier one is served, which is the request itself.
    assert serve_one_among_urgent(aging) == 1 + aging - 1


def test_priority_aging_keeps_the_order_of_what_waits() -> None:
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority", priority_aging=3)
    requests = Requests(scheduler)
    sequences = [requests.add(2, max_tokens=1, priority=p) for p in (1, 0, 2, 0, 0, -1, 0)]
    order = []
    while scheduler.has_unfinished():
        order += [sequences.index(seq) for seq in step(scheduler)]
    # Ranks, 3 x priority + arrival: 4, 2, 9, 4, 5, 3, 7.
    assert order == [1, 5, 0, 3, 4, 6, 2]


def test_the_less_urgent_keeps_its_slot_while_the_more_urgent_waits() -> None:
    """Only a lack of blocks preempts, not a lack of slots."""
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    requests = Requests(scheduler)
    low = requests.add(4, max_tokens=20, priority=9)
    step(scheduler)
    high = requests.add(4, max_tokens=1, priority=0)
    assert [list(step(scheduler)) for _ in range(20)] == [[low]] * 19 + [[high]]
    assert scheduler.num_preemptions == 0


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
    assert [row.n for row in scheduler.schedule().rows] == [40, 8]
    assert a.block_table[:2] == b.block_table[:2]


def test_a_chunk_does_not_offer_what_it_has_not_computed() -> None:
    scheduler = make_scheduler(
        enable_prefix_caching=True, long_prefill_token_threshold=20, max_num_batched_tokens=100
    )
    for i in (1, 2):
        scheduler.add(Sequence(str(i), [5] * 64, SamplingParams(), max_model_len=4096, arrival=i))
    assert [row.start for row in scheduler.schedule().rows] == [0, 16]


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
    scheduler.check()
    assert not scheduler.has_unfinished()
    assert scheduler.block_manager.num_free_blocks == 6
    assert seq.finish_reason == ("length" if state == "finished" else "abort")


@pytest.mark.parametrize("is_on_its_way", [False, True])
def test_a_step_that_raised_is_undone(is_on_its_way: bool) -> None:
    scheduler = make_scheduler(enable_prefix_caching=True)
    requests = Requests(scheduler)
    a, b = requests.add(40), requests.add(20)
    plan = scheduler.schedule()
    if is_on_its_way:
        scheduler.commit(plan)
    scheduler.reset([a, b])
    scheduler.check()
    assert list(scheduler.waiting) == [a, b] and not scheduler.running
    assert scheduler.block_manager.lookup(a) == []  # nothing was computed, nothing is offered
    assert step(scheduler) == {a: 40, b: 20}
    assert a.num_tokens == 41  # and the token that never came does not count


def test_a_reset_keeps_the_order_and_what_was_held() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    requests = Requests(scheduler)
    a, b, c, d, ended = (requests.add(20) for _ in range(5))
    scheduler.finish(ended, "abort")
    scheduler.finish(d, "abort")
    held = requests.add(20)
    scheduler.hold(held, "a grammar is compiled")
    step(scheduler)
    assert scheduler.running == [a, b]
    scheduler.reset([c, held, ended, b, a, d])
    scheduler.check()
    assert list(scheduler.waiting) == [a, b, c] and scheduler.held == {held}
    assert scheduler.num_preemptions == 2  # those that ran
    scheduler.release([held], "a grammar is compiled")
    assert list(scheduler.waiting) == [a, b, c, held]


def test_an_empty_plan_has_no_rows() -> None:
    plan = Plan(budget=5)
    assert (plan.rows, plan.sampled, plan.num_tokens) == ([], [], 0)


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
        plan = scheduler.schedule()
        assert len(seq.block_table) == scheduler.block_manager.blocks_needed(seq.num_tokens)
        end(scheduler, plan)


# ---------------------------------------------------------------- a plan is a value


def test_a_plan_means_the_same_before_during_and_after_its_step() -> None:
    """One row goes on, one ends, one is in the middle of its prompt, one is aborted on the way."""
    scheduler = make_scheduler(max_num_batched_tokens=50)
    requests = Requests(scheduler)
    goes_on, ends, aborted = requests.add(1), requests.add(1, max_tokens=2), requests.add(1)
    step(scheduler)
    chunk = requests.add(100)
    plan = scheduler.schedule()
    said = [(goes_on, 1, 1, 1, 1), (ends, 1, 1, 1, 1), (aborted, 1, 1, 1, 1), (chunk, 0, 47, 0, 0)]

    def check() -> None:
        assert plan.rows == said
        assert plan.sampled == said[:3]
        assert (plan.num_tokens, plan.budget) == (50, 0)
        assert (plan.admitted, plan.preempted) == ([chunk], [])

    check()
    scheduler.commit(plan)
    check()
    scheduler.finish(aborted, "abort")
    assert scheduler.update(plan, [[7], [7], [7]]) == [1, 1, -1]
    check()
    step(scheduler)
    check()
    assert (goes_on.num_tokens, ends.finish_reason) == (4, "length")


def test_a_step_that_is_on_its_way_counts_as_computed_and_its_tokens_as_pending() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=50)
    requests = Requests(scheduler)
    whole, chunk = requests.add(20), requests.add(60)
    plan = scheduler.schedule()
    assert [seq.num_computed_tokens for seq in (whole, chunk)] == [0, 0]
    scheduler.commit(plan)
    state = [(s.num_computed_tokens, s.num_pending, s.num_tokens) for s in (whole, chunk)]
    assert state == [(20, 1, 21), (30, 0, 60)]
    assert whole.num_output_tokens == 0  # it is not known yet
    scheduler.update(plan, [[7]])
    assert (whole.num_tokens, whole.num_pending, whole.output_token_ids) == (21, 0, [7])


def test_a_step_ahead_goes_on_from_what_is_pending() -> None:
    scheduler = make_scheduler()
    requests = Requests(scheduler)
    goes_on, last = requests.add(20), requests.add(20, max_tokens=1)
    first = scheduler.schedule()
    scheduler.commit(first)
    second = scheduler.schedule()
    assert second.rows == [(goes_on, 20, 1, 1, 1)]  # the other one ends with the step under way
    scheduler.commit(second)
    assert scheduler.update(first, [[7], [8]]) == [1, 1]
    assert last.finish_reason == "length" and goes_on.token_ids[20:] == [7]
    assert scheduler.update(second, [[9]]) == [1]
    assert goes_on.token_ids[20:] == [7, 9]
    scheduler.check()


def test_a_row_may_yield_no_token_or_several() -> None:
    scheduler = make_scheduler()
    requests = Requests(scheduler)
    none, two, over = requests.add(5), requests.add(5), requests.add(5, max_tokens=2)
    plan = scheduler.schedule()
    scheduler.commit(plan)
    assert scheduler.update(plan, [[], [7, 8], [7, 8, 9]]) == [0, 2, 2]
    assert none.output_token_ids == [] and none.num_pending == 0
    assert two.output_token_ids == over.output_token_ids == [7, 8]  # max_tokens was two
    assert over.finished and not two.finished
    scheduler.check()
    scheduler.finish(none, "error")  # as whoever gives it no token must do
    assert step(scheduler) == {two: 2}


# ---------------------------------------------------------------- sequences that are held


def test_siblings_are_held_until_their_prompt_is_computed() -> None:
    scheduler = make_scheduler(enable_prefix_caching=True, max_num_batched_tokens=40)
    requests = Requests(scheduler)
    first = requests.add(70, n=3)
    others = set(first.siblings)
    assert scheduler.held == others
    assert all(s.status is SequenceStatus.HELD and s.held_for == {SIBLING} for s in others)
    assert step(scheduler) == {first: 40}
    assert scheduler.held == others
    plan = scheduler.schedule()
    assert counts(plan) == {first: 30} and scheduler.held == others
    scheduler.commit(plan)
    assert not scheduler.held and list(scheduler.waiting) == first.siblings
    assert all(not s.held_for for s in others)
    scheduler.update(plan, [[7]])
    # Four full blocks are shared; the tokens in the last one are each computed once more.
    assert step(scheduler) == {first: 1} | dict.fromkeys(first.siblings, 6)
    assert all(seq.block_table[:4] == first.block_table[:4] for seq in first.siblings)


def test_siblings_share_nothing_without_a_prefix_cache() -> None:
    scheduler = make_scheduler()
    first = Requests(scheduler).add(40, n=2)
    (other,) = first.siblings
    assert step(scheduler) == {first: 40}
    assert step(scheduler) == {first: 1, other: 40}
    assert not set(first.block_table) & set(other.block_table)


def test_nobody_waits_behind_what_is_held() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=50)
    requests = Requests(scheduler)
    first = requests.add(80, n=2)
    assert step(scheduler) == {first: 50}
    later = requests.add(5)
    assert step(scheduler) == {first: 30, later: 5}
    assert scheduler.running == [first, later] and list(scheduler.waiting) == first.siblings


@pytest.mark.parametrize("who", ["first", "held"])
def test_what_is_held_can_be_aborted(who: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=40)
    first = Requests(scheduler).add(70, max_tokens=2, n=3)
    step(scheduler)
    gone, left = first.siblings
    if who == "held":
        scheduler.finish(gone, "abort")
        assert (gone.finish_reason, gone.slot, scheduler.held) == ("abort", -1, {left})
    else:  # whoever aborts a request names all of its sequences
        for seq in (first, gone, left):
            scheduler.finish(seq, "abort")
        assert not scheduler.held and not scheduler.has_unfinished()
    scheduler.check()
    while scheduler.has_unfinished():
        step(scheduler)
    if who == "held":
        assert gone.output_token_ids == []  # it was not queued after all
        assert [len(seq.output_token_ids) for seq in (first, left)] == [2, 2]
    assert scheduler.block_manager.num_free_blocks == 1000


def test_a_sequence_can_be_held_for_any_reason() -> None:
    """Its turn is when it is released, and then by its arrival."""
    scheduler = make_scheduler(max_num_seqs=1)
    requests = Requests(scheduler)
    seq = Sequence("0", [1, 2], SamplingParams(max_tokens=1), 4096, arrival=0)
    scheduler.hold(seq, "its image is being read")
    assert (seq.status, seq.held_for) == (SequenceStatus.HELD, {"its image is being read"})
    later = [requests.add(2, max_tokens=1) for _ in range(2)]
    assert step(scheduler) == {later[0]: 2}
    scheduler.release([seq, later[1]], "another reason")
    assert scheduler.held == {seq} and list(scheduler.waiting) == [later[1]]
    # A sequence that is not held is left alone.
    scheduler.release([seq, later[1]], "its image is being read")
    scheduler.check()
    assert list(scheduler.waiting) == [seq, later[1]] and not seq.held_for
    scheduler.release([seq], "its image is being read")
    scheduler.check()
    assert list(scheduler.waiting) == [seq, later[1]]
    assert step(scheduler) == {seq: 2}


def test_only_held_sequences_are_nothing_to_plan() -> None:
    scheduler = make_scheduler()
    seq = Sequence("0", [1, 2], SamplingParams(), max_model_len=4096)
    scheduler.hold(seq, "a reason")
    assert scheduler.has_unfinished() and scheduler.schedule().rows == []
