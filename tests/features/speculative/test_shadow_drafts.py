"""Scheduler side with draft tokens under the shadow-KV oracle: no rejected token is ever read."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from types import SimpleNamespace
from typing import Any

import pytest
from shadow_kv import Corruption, ShadowRun, require

from nanoserve.config import EngineConfig
from nanoserve.engine import draft_room
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.executor import StepResult
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.features.speculative.extension import Speculation
from nanoserve.features.speculative.proposer import TextProposer

DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}


class Anything(TextProposer):
    """Drafts at random, from a vocabulary in which that is often accepted."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"guesses of {seed}")

    def draft(self, seq: Sequence, most: int) -> list[int]:
        return [self._rng.randrange(2) for _ in range(self._rng.randint(0, most + 1))]


class WatchedSpeculation(Speculation):
    """Draft tokens take what is left over: nothing is evicted or preempted for them."""

    def extend_plan(self, plan: Plan) -> None:
        scheduler = self._scheduler
        manager, running = scheduler.block_manager, list(scheduler.running)
        free = [block for block in manager._free if manager.prefix_cache.has(block)]
        super().extend_plan(plan)
        require(all(map(manager.prefix_cache.has, free)), "evicted for a draft token")
        require(scheduler.running == running, "preempted for a draft token")


class DraftingRun(ShadowRun):
    options: Mapping[str, Any] = {"speculative_config": DRAFTS}

    def __init__(self, seed: int) -> None:
        self.extensions: list[Speculation] = []

        def make(config: EngineConfig, *sizes: Any, **options: Any) -> Scheduler:
            scheduler = Scheduler(config, *sizes, self.extensions, **options)
            engine: Any = SimpleNamespace(config=config, scheduler=scheduler, executor=None)
            self.extensions.append(WatchedSpeculation(engine, lambda *_: Anything(seed)))
            return scheduler

        super().__init__(seed, make)
        self.num_accepted = self.num_rejected = 0

    def _reset(self) -> None:
        super()._reset()
        self.extensions[0].on_reset()

    def _update(self, plan: Plan) -> None:
        if not plan.draft_tokens:
            super()._update(plan)
            return
        pool = self.scheduler.block_manager
        blocks = {slot // self.block_size for slot in self._draft_slots()}
        require(not any(map(pool.prefix_cache.has, blocks)), "a block with draft tokens is cached")
        new_ids = [self._sampled(plan.draft_tokens.get(row.seq, [])) for row in plan.sampled]
        self.scheduler.update(plan, new_ids)
        self.extensions[0].on_result(plan, StepResult(new_ids))
        for seq in plan.draft_tokens:
            if seq.status is SequenceStatus.RUNNING:
                require(seq.num_computed_tokens == len(seq.token_ids) - 1, "what is computed")
                held, needed = len(seq.block_table), pool.blocks_needed(seq.num_tokens)
                require(held <= needed, "blocks are kept for rejected draft tokens")

    def _draft_slots(self) -> list[int]:
        """Return the slots that draft tokens were written to."""
        batch, slots = self.batch, []
        header = batch.header
        for row in range(header.num_decode_rows, header.num_rows):
            first, end = batch.cu_seqlens_q[row : row + 2].tolist()
            slots += batch.slot_mapping[:, first + 1 : end].ravel().tolist()
        return slots

    def _sampled(self, drafts: AbstractSequence[int]) -> list[int]:
        """Return what the device samples: up to the first token that is no draft token."""
        new_ids: list[int] = []
        for draft in [*drafts, None]:
            new_ids.append(self.rng.randrange(self.vocab))
            if new_ids[-1] != draft:
                self.num_rejected += draft is not None
                break
            self.num_accepted += 1
        return new_ids


def test_no_run_reads_what_was_rejected(fuzz_runs: int) -> None:
    accepted = rejected = hit = preempted = 0
    num_runs = -(-fuzz_runs // 2)  # most of what goes on is that of an engine without draft tokens
    for seed in range(num_runs):
        run = DraftingRun(seed)
        try:
            run.run()
        except (Corruption, RuntimeError) as error:
            pytest.fail(f"seed {seed}: {error}")
        accepted += run.num_accepted
        rejected += run.num_rejected
        hit += run.scheduler.num_hit_tokens > 0
        preempted += run.scheduler.num_preemptions > 0
        speculation = run.extensions[0]
        assert not (speculation._drafted or speculation._records), f"seed {seed}: left behind"
    assert min(accepted, rejected) > num_runs, (accepted, rejected)
    assert min(hit, preempted) > 0.1 * num_runs, (hit, preempted)


def draft_tokens_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were tokens of the sequence, before it is known whether they are accepted."""
    schedule = Scheduler.schedule

    def schedule_and_cache(self: Scheduler) -> Plan:
        plan = schedule(self)
        for seq, drafts in plan.draft_tokens.items():
            seq.token_ids += drafts
            self.block_manager.cache(seq, len(seq.token_ids))
            del seq.token_ids[-len(drafts) :]
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule_and_cache)


def one_too_many_counts_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that was sampled last, whose K and V nobody has computed."""
    drop_rejected = Scheduler._drop_rejected

    def drop_too_few(self: Scheduler, row: Row, num_joined: int) -> None:
        drop_rejected(self, row, num_joined)
        seq = row.seq
        if seq.status is SequenceStatus.RUNNING and len(seq.token_ids) < seq.max_num_tokens:
            seq.num_computed_tokens += 1
            seq.token_ids.append(0)

    monkeypatch.setattr(Scheduler, "_drop_rejected", drop_too_few)


def rejected_tokens_count_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_drop_rejected", lambda self, row, num_joined: None)


def blocks_taken_from_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        draft_room,
        "_has_spare_blocks",
        lambda scheduler: scheduler.block_manager.num_free_blocks > 0,
    )


def needed_blocks_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    free = BlockManager.free
    monkeypatch.setattr(
        BlockManager, "free", lambda self, seq, keep=0: free(self, seq, max(0, keep - 1))
    )


PLANTED_BUGS = [
    draft_tokens_cached,
    blocks_taken_from_the_prefix_cache,
    one_too_many_counts_as_computed,
    rejected_tokens_count_as_computed,
    needed_blocks_given_back,
]


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_the_oracle_catches(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `Scheduler.check`, which would see some of these before the oracle does."""
    plant(monkeypatch)
    monkeypatch.setattr(Scheduler, "check", lambda self: None)
    with pytest.raises((Corruption, IndexError, KeyError, ValueError)) as caught:
        for seed in range(1000):
            DraftingRun(seed).run()
    print(repr(caught.value))
