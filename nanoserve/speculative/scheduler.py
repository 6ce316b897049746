"""A step's guesses, where there is room for them."""

from dataclasses import dataclass, field
from typing import Any

from nanoserve.config import EngineConfig
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.speculative.goodput import Goodput, Record
from nanoserve.speculative.proposer import Proposer

_LATEST = 16  # steps until somebody looks whether anybody is to be asked


@dataclass
class Asked:
    """A row that may guess."""

    index: int  # of the row in the plan
    row: Row
    record: Record
    count: int  # of guesses: so many may be, and then are
    guesses: list[int] = field(default_factory=list)


class SpeculativeScheduler(Scheduler):
    """Plans a step as ever, and then adds guesses to rows that decode.

    They take what is left: tokens of the budget, and free blocks that the prefix cache does not
    have. So nobody is preempted or evicted for them, and nobody waits: a step that computes a
    prompt has none. Blocks that only wrong guesses needed are given back when the step is over.

    When the step is on its way, all guesses count as computed, as any token does, and as many
    tokens as there can be are pending. `settle` takes back what was not right.
    """

    proposer: Proposer  # set before the first step: it may need the pool

    def __init__(self, config: EngineConfig, num_kv_blocks: int, max_model_len: int) -> None:
        super().__init__(config, num_kv_blocks, max_model_len)
        self.start_guessing(config)

    def start_guessing(self, config: EngineConfig) -> None:
        """Without a `speculative_config` nobody is asked for guesses."""
        asked = config.speculative_config
        self._most = 0 if asked is None else asked.num_speculative_tokens
        self.goodput = None
        if asked is not None and asked.adaptive:
            self.goodput = Goodput(self._most, asked.model is not None)
        self._is_ahead = config.async_scheduling
        self._records: dict[Sequence, Record] = {}
        self._step = 0
        self._ask_at = 0  # nobody is to be asked in a step before

    def schedule(self) -> Plan:
        plan = super().schedule()
        self._step += 1
        for seq in plan.admitted:
            self._ask_at = 0
            self.proposer.begin(seq)
        # Who computes a prompt is not kept waiting by guesses.
        is_free = plan.rows and not plan.admitted and not plan.preempted
        if is_free and plan.num_tokens == len(plan.rows):
            self._guess(plan)
        return plan

    def settle(self, plan: Plan, token_ids: list[list[int]]) -> None:
        """Count what was right of a step's guesses; its tokens, as in `update`, have joined."""
        pool, running = self.block_manager, SequenceStatus.RUNNING
        for (seq, start, n, *_), new_ids in zip(plan.sampled, token_ids, strict=True):
            # Else it has ended, or was preempted while the step was under way.
            is_here = seq.status is running and seq.num_computed_tokens == start + n
            if seq in plan.guesses and is_here:
                seq.num_computed_tokens = start + len(new_ids)
                plan.registered_blocks += pool.cache(seq, seq.num_computed_tokens)
                self._trim(seq)

    def note_guesses(self, seq: Sequence, guesses: list[int], right: int) -> None:
        record = self._records.get(seq)
        if record is not None and self.goodput is not None:  # else it has ended
            self.goodput.note_guesses(record, len(guesses), right)
            self._ask_at = min(self._ask_at, record.ask_at)

    def note_step(self, plan: Plan, *figures: Any) -> None:
        """What a step has taken, see `Goodput.note_step`."""
        self.goodput.note_step(*figures)

    def _guess(self, plan: Plan) -> None:
        if self._most and (self._step >= self._ask_at or self.goodput is None):
            self._add_guesses(plan)

    def _may_guess(self, seq: Sequence) -> bool:
        # A processor of its own may count how often it is called.
        may_guess = seq.params.num_speculative_tokens != 0 and not seq.params.logits_processors
        return may_guess and self._most > 0

    def _add_guesses(self, plan: Plan) -> None:
        num_rows = len(plan.rows)
        if self.goodput is not None and self.goodput.is_plain_due:
            return
        if self.goodput is not None and not self.goodput.may_pay(num_rows):
            self._ask_at = self._step + _LATEST
            return
        asked = self._whom_to_ask(plan)
        if not asked:
            return
        # What a model would guess has to be computed, so it is asked for no more than has room.
        if not self.proposer.is_model:
            self._propose(asked)
        if self.goodput is not None:
            counts = self.goodput.choose(num_rows, [(a.record, a.count) for a in asked])
            for a, count in zip(asked, counts, strict=True):
                a.count = count
            if self.proposer.is_model and not any(counts):
                self.goodput.fade([a.record for a in asked])
                self._ask_at = self._step + _LATEST
                return
        for a in asked:
            a.count = self._room_behind(a.row, min(a.count, plan.budget))
            plan.budget -= a.count
        if self.proposer.is_model:
            self._propose([a for a in asked if a.count])
        for a in asked:
            if a.count:
                n = 1 + a.count
                plan.rows[a.index] = a.row._replace(n=n, num_outputs=n, num_sampled=n)
                plan.guesses[a.row.seq] = a.guesses[: a.count]
            elif self.goodput is not None and a.guesses:
                a.record.keep(a.guesses, len(a.row.seq.token_ids), self._step)
            else:
                a.record.fade()
                self._trim(a.row.seq)  # a model that was asked may have had no guess
            self._ask_at = min(self._ask_at, a.record.ask_at)
        plan.put_single_tokens_first()

    def _whom_to_ask(self, plan: Plan) -> list[Asked]:
        asked: list[Asked] = []
        self._ask_at = self._step + _LATEST
        for index, row in enumerate(plan.rows):
            seq = row.seq
            if not self._may_guess(seq):
                continue
            if row.start < seq.num_prompt_tokens:
                self._ask_at = 0  # it will be soon
                continue
            record = self._records.get(seq)
            if record is None:
                record = Record() if self.goodput is None else self.goodput.new_record()
                self._records[seq] = record
            if record.ask_at > self._step:
                self._ask_at = min(self._ask_at, record.ask_at)
            elif row.num_sampled and not seq.num_pending:
                if self.goodput is not None:
                    self.goodput.compare(record, seq.token_ids)
                most = self._most_guesses(seq)
                if most > 0:
                    asked.append(Asked(index, row, record, most))
            else:
                self._ask_at = 0
        return asked

    def _propose(self, asked: list[Asked]) -> None:
        proposed = self.proposer.propose([(a.row.seq, a.count) for a in asked])
        for a, guesses in zip(asked, proposed, strict=True):
            a.guesses = guesses[: a.count]
            a.count = len(a.guesses)
            if not guesses and self.goodput is not None:
                a.record.miss(self._step)

    def _most_guesses(self, seq: Sequence) -> int:
        """Every token but the last one that it may have can follow a guess."""
        asked = seq.params.num_speculative_tokens
        most = self._most if asked is None else min(self._most, asked)
        return min(most, seq.max_num_tokens - seq.num_tokens - 1)

    def _room_behind(self, row: Row, most: int) -> int:
        """How many guesses have a place, if blocks are taken that nobody will miss."""
        seq, pool = row.seq, self.block_manager
        room = len(seq.block_table) * pool.block_size - row.start - 1
        while room < most and self._has_spare_block():
            self._grow(seq, 1 + room + 1)
            room += pool.block_size
        return min(room, most)

    def _has_spare_block(self) -> bool:
        block = self.block_manager.next_free_block()
        if not block or self.block_manager.is_cached(block):
            return False
        # The next step, if it is planned before this one is over, may need a block for each.
        is_scarce = self.block_manager.num_free_blocks <= len(self.running)
        return not (self._is_ahead and (self.waiting or is_scarce))

    def _trim(self, seq: Sequence) -> None:
        """Give back blocks that none of its tokens needs."""
        pool = self.block_manager
        pool.free(seq, keep=pool.blocks_needed(seq.num_tokens))

    def _release(self, seq: Sequence, status: SequenceStatus) -> None:
        super()._release(seq, status)
        if status is SequenceStatus.FINISHED:
            self._records.pop(seq, None)
            self.proposer.forget(seq)


class AheadScheduler(SpeculativeScheduler):
    """With `async_scheduling`: a sequence that guesses is left out of the step ahead.

    Its next step is planned when this one is over, and so is the one in which it begins to guess:
    no guess is made behind a token that is still pending.
    """

    def _plan_row(self, seq: Sequence, plan: Plan) -> None:
        if seq.num_pending > 1 or (seq.num_pending and self._waits(seq)):
            return
        super()._plan_row(seq, plan)

    def _waits(self, seq: Sequence) -> bool:
        """Whether it had better wait for its pending token, to guess what comes behind it."""
        record = self._records.get(seq)
        if not self._may_guess(seq) or (record is not None and record.ask_at > self._step):
            return False
        return self.goodput is None or self.goodput.may_pay(len(self.running))
