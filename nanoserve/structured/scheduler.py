"""Forced runs as guesses: where a grammar leaves one way, there is nothing to wait for."""

from typing import Any

from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.speculative.scheduler import AheadScheduler, Asked, SpeculativeScheduler
from nanoserve.structured.guided import Guided

GRAMMAR = "its grammar is compiled"  # a reason to be held
MOST_FORCED = 32  # tokens of a run that one step takes


class GuidedScheduler(SpeculativeScheduler):
    """Plans a step as ever. Behind the last token of a guided sequence it sets what must come.

    Such a run needs no opinion on what guesses are worth: each of its tokens would have taken a
    place in a later step. Guesses of others are cut where the grammar forbids them.
    """

    def start_guiding(self, adds_forced: bool) -> None:
        self.guided: dict[Sequence, Guided] = {}  # those that have a grammar and have not ended
        self._adds_forced = adds_forced
        self._forced: set[Sequence] = set()  # whose guesses under way are a forced run

    def add(self, seq: Sequence) -> None:
        super().add(seq)
        if seq.params.structured_outputs is not None and seq not in self.guided:
            self._leave_queue(seq)
            self.hold(seq, GRAMMAR)

    def update(self, plan: Plan, token_ids: list[list[int]]) -> list[int]:
        """What its grammar has led to an end has stopped, even if there was no more room anyway."""
        guided = {row.seq: self.guided.get(row.seq) for row in plan.sampled}
        joined = super().update(plan, token_ids)
        for (seq, state), num_joined in zip(guided.items(), joined, strict=True):
            if state is None or num_joined < 1 or seq.finish_reason not in (None, "length"):
                continue
            if state.is_terminated():
                self.finish(seq, "stop")
                seq.finish_reason = "stop"
        return joined

    def note_step(self, plan: Plan, *figures: Any) -> None:
        if self._forced.isdisjoint(plan.guesses):  # what runs cost says nothing of others' guesses
            super().note_step(plan, *figures)

    def note_guesses(self, seq: Sequence, guesses: list[int], right: int) -> None:
        if seq not in self._forced:
            super().note_guesses(seq, guesses, right)
        elif seq in self.guided:  # else it has ended, perhaps amid the run
            self.guided[seq].note_forced(right == len(guesses))

    def _guess(self, plan: Plan) -> None:
        self._forced.difference_update(row.seq for row in plan.rows)
        for index, row in enumerate(plan.rows):
            if self._may_force(row.seq) and row.num_sampled and not row.seq.num_pending:
                self._add_forced(plan, index, row)
        super()._guess(plan)
        plan.put_single_tokens_first()

    def _add_forced(self, plan: Plan, index: int, row: Row) -> None:
        seq, asked = row.seq, row.seq.params.num_speculative_tokens
        most = MOST_FORCED if asked is None else min(MOST_FORCED, asked)
        # Every token but the last one that it may have can follow a guess.
        most = min(most, plan.budget, seq.max_num_tokens - seq.num_tokens - 1)
        run = self.guided[seq].forced(most) if most > 0 else []
        run = run[: self._room_behind(row, len(run))]
        if run:
            n = 1 + len(run)
            plan.budget -= len(run)
            plan.rows[index] = row._replace(n=n, num_outputs=n, num_sampled=n)
            plan.guesses[seq] = run
            self._forced.add(seq)

    def _may_force(self, seq: Sequence) -> bool:
        # A processor of its own may count how often it is called.
        may_guess = seq.params.num_speculative_tokens != 0 and not seq.params.logits_processors
        return self._adds_forced and may_guess and seq in self.guided

    def _may_guess(self, seq: Sequence) -> bool:
        return super()._may_guess(seq) and seq not in self._forced

    def _propose(self, asked: list[Asked]) -> None:
        super()._propose(asked)
        for a in asked:
            if a.row.seq in self.guided:
                a.guesses = self.guided[a.row.seq].legal(a.guesses)
                a.count = len(a.guesses)

    def _release(self, seq: Sequence, status: SequenceStatus) -> None:
        super()._release(seq, status)
        if status is SequenceStatus.FINISHED:
            self.guided.pop(seq, None)


class GuidedAheadScheduler(GuidedScheduler, AheadScheduler):
    """With `async_scheduling`: behind a token that is pending nobody knows what must come."""

    def _waits(self, seq: Sequence) -> bool:
        return self._may_force(seq) or super()._waits(seq)
