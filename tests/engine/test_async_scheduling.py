"""One step ahead: the same tokens as without, whatever happens while two steps are under way.

The device does everything as late as it may (tests/support/late_executor.py). What a request must
yield is known without an engine, so both ways of running are held against that.
"""

from collections import Counter
from typing import Any

import late_executor
import pytest
from ahead_run import LETTERS, AheadRun
from late_executor import Corruption, LateExecutor, LatePipeline, expected_tokens

from nanoserve.engine.batch import Batch
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import ForwardInputs
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.features.parallel.pipeline_schedule import PipelineSchedule


def run_many(
    num_runs: int, ahead: bool, num_stages: int = 1, with_tier: bool = False
) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        num_places = (1, 2, 5, 20)[seed % 4] if with_tier else None
        run = AheadRun(seed, ahead, num_stages, num_places)
        try:
            run.run()
        except Exception as error:
            pytest.fail(f"seed {seed}, ahead={ahead}, {num_stages} stages: {error!r}")
        seen["overlapped"] += run.most_in_flight > 0
        seen["failed"] += run.num_failures > 0
        seen["preempted"] += run.engine.scheduler.num_preemptions > 0
        seen["hit"] += run.engine.scheduler.num_hit_tokens > 0
        seen["loaded"] += run.tier is not None and run.tier.stats.num_loaded > 0
        seen["aborted"] += any(asked.aborted for asked in run.asked)
        seen["windows"] += run.engine.scheduler.block_manager.has_windows
    return seen


HARD = ("failed", "preempted", "hit", "aborted", "windows")


@pytest.mark.parametrize("ahead", [True, False], ids=["one step ahead", "no step ahead"])
def test_every_request_gets_its_tokens(fuzz_runs: int, ahead: bool) -> None:
    # Without a step ahead nothing can come too late: fewer runs show the same.
    num_runs = fuzz_runs // (3 if ahead else 8)
    seen = run_many(num_runs, ahead)
    assert (seen["overlapped"] > 0.5 * num_runs) == ahead
    # The runs must be hard enough to mean something.
    assert min(seen[what] for what in HARD) > 0.1 * num_runs


@pytest.mark.small(num_stages=[3])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_every_request_gets_its_tokens_from_a_pipeline(fuzz_runs: int, num_stages: int) -> None:
    """Several steps are under way, of which the first stage has computed more than the last."""
    num_runs = max(40, fuzz_runs // 12)
    seen = run_many(num_runs, False, num_stages)
    assert seen["overlapped"] > 0.5 * num_runs
    assert min(seen[what] for what in HARD) > 0.1 * num_runs


@pytest.mark.small(num_stages=[1])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_request_gets_its_tokens_with_a_host_tier(fuzz_runs: int, num_stages: int) -> None:
    num_runs = max(40, fuzz_runs // 6)
    seen = run_many(num_runs, num_stages == 1, num_stages, with_tier=True)
    assert min(seen[what] for what in HARD) > 0.1 * num_runs
    assert seen["loaded"] > 0.02 * num_runs


def readmitted_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is preempted may run again before a step under way has given it its token."""
    monkeypatch.setattr(PipelineSchedule, "on_release", Extension.on_release)


def in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is not left out of a step because its token is pending."""

    def limit_tokens(self: PipelineSchedule, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        return num_tokens

    monkeypatch.setattr(PipelineSchedule, "limit_tokens", limit_tokens)


def settings_at_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot's settings change while a step of its last owner is under way."""
    forward = LatePipeline.forward

    def early(self: LatePipeline, batch: Batch, inputs: ForwardInputs) -> Any:
        handle = forward(self, batch, ForwardInputs())
        for change in inputs.slot_updates:
            self.states[change.slot] = late_executor.State(change, list(change.output_token_ids))
        return handle

    monkeypatch.setattr(LatePipeline, "forward", early)


def search(known: int, num_seeds: int, full_size: bool) -> list[int]:
    """Return the seeds to try: all of them in turn, but at small size one that is known first."""
    return [*([] if full_size else [known]), *range(num_seeds)]


# Each with the first seed whose run shows it.
@pytest.mark.parametrize(
    ("plant", "known"), [(readmitted_too_early, 282), (in_two_steps, 2), (settings_at_launch, 35)]
)
def test_bugs_planted_into_a_pipeline_are_seen(
    plant: Any, known: int, full_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((Corruption, IndexError, ValueError, AssertionError, RuntimeError)):
        for seed in search(known, 3000, full_size):
            AheadRun(seed, False, 2 + seed % 4).run()


# ---------------------------------------------------------------- planted bugs


def pending_token_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is offered before its last token is known, as if that were an `a`."""
    original = BlockManager.cache

    def cache(self: BlockManager, seq: Sequence, num_tokens: int) -> list[int]:
        missing = num_tokens - len(seq.token_ids)
        seq.token_ids += [97] * missing
        published = original(self, seq, num_tokens)
        if missing > 0:
            del seq.token_ids[-missing:]
        return published

    monkeypatch.setattr(BlockManager, "cache", cache)


def state_learns_its_token_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time a token is there, its slot may have gone to another sequence."""
    monkeypatch.setattr(LateExecutor, "records_by_slot", True)


def pending_token_read_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateExecutor, "reads_pending_by_row", True)


def slot_freed_when_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What will end by length gives its slot away while its last step is still to be planned."""
    original = Scheduler._schedule_running

    def schedule_running(self: Scheduler, plan: Any) -> None:
        original(self, plan)
        for row in plan.rows:
            if row.num_sampled and row.seq.num_tokens + 1 >= row.seq.max_num_tokens:
                self._slots._free.append(row.seq.slot)

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_running)


def blocks_freed_before_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What will end by length gives its blocks back when its last step is planned."""
    original = Scheduler._schedule_running

    def schedule_running(self: Scheduler, plan: Any) -> None:
        original(self, plan)
        for row in plan.rows:
            if row.num_sampled and row.seq.num_tokens + 1 >= row.seq.max_num_tokens:
                self.block_manager.free(row.seq)

    monkeypatch.setattr(Scheduler, "_schedule_running", schedule_running)


def stale_row_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of a sequence that has ended a step ago counts like any other."""
    original = Scheduler.update

    def update(self: Scheduler, plan: Any, token_ids: list[list[int]]) -> list[int]:
        ended = [row.seq for row in plan.sampled if row.seq.finished]
        for seq in ended:
            seq.status, seq.finish_reason = SequenceStatus.HELD, None
        joined = original(self, plan, token_ids)
        for seq in ended:
            seq.status = SequenceStatus.FINISHED
        return joined

    monkeypatch.setattr(Scheduler, "update", update)


def progress_counts_only_at_update(monkeypatch: pytest.MonkeyPatch) -> None:
    original, late = Scheduler.commit, Scheduler.update
    monkeypatch.setattr(Scheduler, "commit", lambda self, plan: None)

    def update(self: Scheduler, plan: Any, token_ids: list[list[int]]) -> list[int]:
        original(self, plan)
        return late(self, plan, token_ids)

    monkeypatch.setattr(Scheduler, "update", update)


def batch_reused_one_step_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_batch(self: LateExecutor) -> Batch:
        batch = self.batches[0]
        batch.memory[:] = 0xAA
        batch.step, self.num_batches = self.num_batches, self.num_batches + 1
        return batch

    monkeypatch.setattr(LateExecutor, "next_batch", next_batch)


def released_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pending token counts as computed, so the step ahead lacks the first token that it sees."""
    original = BlockManager._release_behind_windows

    def release(self: BlockManager, seq: Sequence) -> None:
        seq.num_computed_tokens += seq.num_pending
        original(self, seq)
        seq.num_computed_tokens -= seq.num_pending

    monkeypatch.setattr(BlockManager, "_release_behind_windows", release)


def released_before_the_step_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind the window after a step goes to others in that step, which write first."""
    original = Scheduler._plan_row

    def plan_row(self: Scheduler, seq: Sequence, plan: Plan) -> None:
        num_rows = len(plan.rows)
        original(self, seq, plan)
        for row in plan.rows[num_rows:]:
            seq.num_computed_tokens = row.start + row.n
            self.block_manager._release_behind_windows(seq)
            seq.num_computed_tokens = row.start

    monkeypatch.setattr(Scheduler, "_plan_row", plan_row)


def packed_by_the_table_of_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Batch.pack

    def pack(self: Batch, plan: Plan, block_tables: Any, block_size: int) -> None:
        original(self, plan, block_tables[::-1], block_size)

    monkeypatch.setattr(Batch, "pack", pack)


# With the first seed whose run shows each.
PLANTED_BUGS = {
    pending_token_published: 131,
    state_learns_its_token_by_slot: 6,
    pending_token_read_by_row: 3,
    slot_freed_when_planned: 3,
    blocks_freed_before_update: 3,
    stale_row_delivered: 0,
    progress_counts_only_at_update: 5,
    batch_reused_one_step_early: 0,
    released_one_token_early: 6,
    released_before_the_step_has_read: 3,
    packed_by_the_table_of_another_group: 17,
}


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(
    plant: Any, full_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the invariants, which would see some of these before the device does."""
    plant(monkeypatch)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    for seed in search(PLANTED_BUGS[plant], 1000, full_size):
        try:
            AheadRun(seed, ahead=True).run()
        except (Corruption, LookupError, ValueError, AssertionError, AttributeError):
            return
    pytest.fail("1000 runs with a planted bug, and none was caught")


def test_the_device_sees_what_a_planted_bug_does() -> None:
    """`expected_tokens` and the device agree, and disagree as soon as a prefix differs."""
    tokens = expected_tokens([97, 98], 1, 0, LETTERS, 20)
    assert tokens == expected_tokens([97, 98], 1, 0, LETTERS, 20)
    assert tokens != expected_tokens([98, 98], 1, 0, LETTERS, 20)
    assert late_executor.POISON not in LETTERS
