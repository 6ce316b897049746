"""The brain with guesses under the shadow-KV oracle: what was not right is never read."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Any

import pytest
import shadow_kv
from shadow_kv import Corruption, ShadowRun, require

from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import BlockManager
from nanoserve.engine.plan import Plan
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.speculative.proposer import TextProposer
from nanoserve.speculative.scheduler import SpeculativeScheduler

GUESSES = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}


class Anything(TextProposer):
    """Guesses at random, from a vocabulary in which that is often right."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"guesses of {seed}")

    def guess(self, seq: Sequence, most: int) -> list[int]:
        return [self._rng.randrange(2) for _ in range(self._rng.randint(0, most + 1))]


class GuessingRun(ShadowRun):
    options: Mapping[str, Any] = {"speculative_config": GUESSES}

    def __init__(self, seed: int) -> None:
        def make(config: EngineConfig, *sizes: Any) -> SpeculativeScheduler:
            scheduler = SpeculativeScheduler(config, *sizes)
            scheduler.proposer = Anything(seed)
            return scheduler

        super().__init__(seed, make)
        self.num_right = self.num_wrong = 0
        self._add, self.scheduler._add_guesses = self.scheduler._add_guesses, self._watched

    def _watched(self, plan: Plan) -> None:
        scheduler = self.scheduler
        published, running = dict(scheduler.block_manager._block_of), list(scheduler.running)
        self._add(plan)
        require(scheduler.block_manager._block_of == published, "evicted for a guess")
        require(scheduler.running == running, "preempted for a guess")

    def _update(self, plan: Plan) -> None:
        if not plan.guesses:
            super()._update(plan)
            return
        cached, pool = self._cached_slots(), self.scheduler.block_manager
        require(not any(pool.is_cached(slot // self.block_size) for slot in cached), "evicted")
        new_ids = [self._sampled(plan.guesses.get(row.seq, [])) for row in plan.sampled]
        self.scheduler.update(plan, new_ids)
        self.scheduler.settle(plan, new_ids)
        for seq in plan.guesses:
            if seq.status is SequenceStatus.RUNNING:
                require(seq.num_computed_tokens == len(seq.token_ids) - 1, "what is computed")
                held, needed = len(seq.block_table), pool.blocks_needed(seq.num_tokens)
                require(held <= needed, "blocks are kept for wrong guesses")

    def _cached_slots(self) -> list[int]:
        """None of those that guesses were written to is in a published block."""
        batch, slots = self.batch, []
        header = batch.header
        for row in range(header.num_decode_rows, header.num_rows):
            first, end = batch.cu_seqlens_q[row : row + 2].tolist()
            slots += batch.slot_mapping[first + 1 : end].tolist()
        return slots

    def _sampled(self, guesses: AbstractSequence[int]) -> list[int]:
        """What the device draws: up to the first token that was not guessed."""
        new_ids: list[int] = []
        for guess in [*guesses, None]:
            new_ids.append(self.rng.randrange(self.vocab))
            if new_ids[-1] != guess:
                self.num_wrong += guess is not None
                break
            self.num_right += 1
        return new_ids


def test_no_run_reads_what_was_guessed_wrong(fuzz_runs: int) -> None:
    right = wrong = hit = preempted = 0
    num_runs = -(-fuzz_runs // 2)  # most of what goes on is that of an engine without guesses
    for seed in range(num_runs):
        run = GuessingRun(seed)
        try:
            run.run()
        except (Corruption, RuntimeError) as error:
            pytest.fail(f"seed {seed}: {error}")
        right += run.num_right
        wrong += run.num_wrong
        hit += run.scheduler.num_hit_tokens > 0
        preempted += run.scheduler.num_preemptions > 0
    assert min(right, wrong) > num_runs, (right, wrong)
    assert min(hit, preempted) > 0.1 * num_runs, (hit, preempted)


def guesses_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were tokens of the sequence, before anybody has seen whether they are right."""
    schedule = SpeculativeScheduler.schedule

    def schedule_and_publish(self: SpeculativeScheduler) -> Plan:
        plan = schedule(self)
        for seq, guesses in plan.guesses.items():
            seq.token_ids += guesses
            self.block_manager.cache(seq, len(seq.token_ids))
            del seq.token_ids[-len(guesses) :]
        return plan

    monkeypatch.setattr(SpeculativeScheduler, "schedule", schedule_and_publish)


def one_too_many_counts_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token that was sampled last, whose K and V nobody has computed."""
    settle = SpeculativeScheduler.settle

    def settle_wrongly(self: SpeculativeScheduler, plan: Plan, token_ids: Any) -> None:
        settle(self, plan, token_ids)
        for seq in plan.guesses:
            if seq.status is SequenceStatus.RUNNING and len(seq.token_ids) < seq.max_num_tokens:
                seq.num_computed_tokens += 1
                seq.token_ids.append(0)

    monkeypatch.setattr(SpeculativeScheduler, "settle", settle_wrongly)


def blocks_taken_from_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SpeculativeScheduler,
        "_has_spare_block",
        lambda self: self.block_manager.num_free_blocks > 0,
    )


def needed_blocks_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    free = BlockManager.free
    monkeypatch.setattr(
        BlockManager, "free", lambda self, seq, keep=0: free(self, seq, max(0, keep - 1))
    )


PLANTED_BUGS = [
    guesses_published,
    blocks_taken_from_the_prefix_cache,
    one_too_many_counts_as_computed,
    needed_blocks_given_back,
]


@pytest.mark.parametrize("plant", PLANTED_BUGS, ids=lambda plant: plant.__name__)
def test_the_oracle_catches(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the invariants, which would see some of these before the oracle does."""
    plant(monkeypatch)
    monkeypatch.setattr(shadow_kv, "check_invariants", lambda scheduler: None)
    with pytest.raises((Corruption, IndexError, KeyError, ValueError)):
        for seed in range(1000):
            GuessingRun(seed).run()
