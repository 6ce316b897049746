"""Speculative decoding is an extension of the engine that adds draft tokens to decode rows.

It uses only what a step leaves over, i.e. the rest of the token budget and free blocks without
cached prefixes. A step that computes prompt tokens gets no draft tokens, so drafting does not delay
the first token of a request. Accepted tokens are the tokens that would have been sampled anyway;
see `nanoserve.engine.draft_tokens`.

With async scheduling, the next step is planned before the results of the current one are known. A
sequence whose draft tokens are in flight is left out of that plan, and so is one for which it is
better to wait for its pending token and to draft after it.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoserve.engine.batch import Batch
from nanoserve.engine.draft_room import max_draft_tokens, may_draft, reserve_draft_tokens
from nanoserve.engine.draft_tokens import accepted_of_drafts
from nanoserve.engine.executor import StepResult
from nanoserve.engine.extension import Extension, PreparedFeature
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.features.speculative.config import METHODS
from nanoserve.features.speculative.goodput import Goodput, Record
from nanoserve.features.speculative.proposer import MakeProposer, PrepareProposer

if TYPE_CHECKING:
    from nanoserve.checkpoint.model_config import ModelConfig
    from nanoserve.config import EngineConfig
    from nanoserve.engine.guard import GuardedEngine

_LATEST = 16  # the proposer is called again after at most this many steps
_PLAIN_SHARE = 4  # of the steps without draft tokens, one in this many is timed


@dataclass
class Candidate:
    """A row that may have draft tokens."""

    index: int  # of the row in the plan
    row: Row
    record: Record
    count: int  # of draft tokens: at first the most it may have, later the actual number
    draft_tokens: list[int] = field(default_factory=list)


class Speculation(Extension):
    """Adds the draft tokens of a proposer to decode steps.

    `goodput` chooses how many. If it is None (`adaptive=False`), all are added.
    """

    def __init__(self, engine: "GuardedEngine", make_proposer: MakeProposer) -> None:
        config = engine.config
        options = config.speculative_config
        self._scheduler = engine.scheduler
        self._is_async = config.async_scheduling
        self._most = options.num_speculative_tokens
        self.proposer = make_proposer(engine.executor, engine.scheduler)
        self.goodput: Goodput | None = None
        if options.adaptive:
            self.goodput = Goodput(self._most, options.model is not None)
            engine.observers.append(self._record_time)
        self._records: dict[Sequence, Record] = {}
        self._drafted: dict[Sequence, list[int]] = {}  # draft tokens of this extension in flight
        # Plans with draft tokens of other extensions, by id, until their step has been timed.
        self._foreign: dict[int, Plan] = {}
        self._step = 0
        self._propose_at = 0  # the first step in which any sequence can be a candidate

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        if self._is_async and seq.num_pending and self._waits(seq):
            return 0
        return num_tokens

    def extend_plan(self, plan: Plan) -> None:
        self._step += 1
        for seq in plan.admitted:
            self._propose_at = 0
            self.proposer.begin(seq)
        if plan.only_decodes and (self._step >= self._propose_at or self.goodput is None):
            self._add_drafts(plan)

    def on_result(self, plan: Plan, result: StepResult) -> None:
        if plan.draft_tokens:
            self._judge(plan, result)
        if self.proposer.needs_hidden:
            for row, output in zip(plan.sampled, result.hidden_rows, strict=True):
                if row.seq.status is SequenceStatus.RUNNING:
                    self.proposer.learn(row.seq, result.hidden, output)

    def on_release(self, seq: Sequence) -> None:
        if seq.finished:
            self._records.pop(seq, None)
            self.proposer.forget(seq)

    def on_reset(self) -> None:
        self._drafted.clear()
        self._foreign.clear()

    def close(self) -> None:
        self.proposer.close()

    def _add_drafts(self, plan: Plan) -> None:
        num_rows, goodput = len(plan.rows), self.goodput
        if goodput is not None and goodput.is_plain_due:
            return
        if goodput is not None and not goodput.may_pay(num_rows):
            self._propose_at = self._step + _LATEST
            return
        candidates = self._candidates(plan)
        if not candidates:
            return
        # 1) Propose. A model has to compute its draft tokens, so it is called in 4) instead, for
        #    those only that have room.
        if not self.proposer.is_model:
            self._propose(plan, candidates)
        # 2) Choose how many of them to verify.
        if goodput is not None:
            counts = goodput.choose(num_rows, [(c.record, c.count) for c in candidates])
            for candidate, count in zip(candidates, counts, strict=True):
                candidate.count = count
            if self.proposer.is_model and not any(counts):
                goodput.fade([c.record for c in candidates])
                self._propose_at = self._step + _LATEST
                return
        # 3) Reserve KV cache and token budget for these.
        for c in candidates:
            c.count = reserve_draft_tokens(self._scheduler, plan, c.row, c.count)
        # 4) A model drafts as many as were chosen.
        if self.proposer.is_model:
            self._propose(plan, [c for c in candidates if c.count])
        # 5) Put them into the plan.
        for c in candidates:
            self._put(plan, c)
            self._propose_at = min(self._propose_at, c.record.propose_at)

    def _put(self, plan: Plan, candidate: Candidate) -> None:
        seq, record = candidate.row.seq, candidate.record
        if candidate.count:
            drafts = candidate.draft_tokens[: candidate.count]
            plan.set_draft_tokens(candidate.index, drafts)
            self._drafted[seq] = drafts
        elif self.goodput is not None and candidate.draft_tokens:
            record.keep(candidate.draft_tokens, len(seq.token_ids), self._step)
        else:
            record.fade()
            self._scheduler.trim(seq)  # free what was reserved for a model without a draft token

    def _candidates(self, plan: Plan) -> list[Candidate]:
        """Return the rows that may have draft tokens now, and set the step of the next search."""
        candidates: list[Candidate] = []
        self._propose_at = self._step + _LATEST
        for index, row in enumerate(plan.rows):
            seq = row.seq
            if seq in plan.draft_tokens or not may_draft(self._scheduler, seq):
                continue
            if row.start < seq.num_prompt_tokens:
                self._propose_at = 0  # it will decode soon
                continue
            record = self._records.get(seq)
            if record is None:
                record = self._records[seq] = (
                    Record() if self.goodput is None else self.goodput.new_record()
                )
            if record.propose_at > self._step:
                self._propose_at = min(self._propose_at, record.propose_at)
            elif row.num_sampled and not seq.num_pending:
                if self.goodput is not None:
                    self.goodput.compare(record, seq.token_ids)
                most = min(self._most, max_draft_tokens(self._scheduler, row))
                if most > 0:
                    candidates.append(Candidate(index, row, record, most))
            else:
                self._propose_at = 0
        return candidates

    def _propose(self, plan: Plan, candidates: list[Candidate]) -> None:
        proposed = self.proposer.propose([(c.row.seq, c.count) for c in candidates])
        for c, drafts in zip(candidates, proposed, strict=True):
            drafts = drafts[: c.count]
            if not drafts and self.goodput is not None:
                c.record.miss(self._step)
            if c.row.seq in plan.draft_filters:
                drafts = plan.draft_filters[c.row.seq](drafts)
            c.draft_tokens, c.count = drafts, len(drafts)

    def _waits(self, seq: Sequence) -> bool:
        """Return True if `seq` should wait for its pending token, so as to draft after it."""
        record = self._records.get(seq)
        if record is not None and record.propose_at > self._step:
            return False
        if not may_draft(self._scheduler, seq):
            return False
        return self.goodput is None or self.goodput.may_pay(len(self._scheduler.running))

    def _judge(self, plan: Plan, result: StepResult) -> None:
        """Record how many draft tokens of each sequence were accepted."""
        for row, token_ids in zip(plan.sampled, result.token_ids, strict=True):
            drafts = plan.draft_tokens.get(row.seq)
            if drafts is None:
                continue
            if self._drafted.pop(row.seq, None) is not drafts:
                if self.goodput is not None:
                    self._foreign[id(plan)] = plan
                continue
            record = self._records.get(row.seq)
            if record is not None and self.goodput is not None:  # without a record it has ended
                self.goodput.record_accepted(record, len(drafts), max(0, len(token_ids) - 1))
                self._propose_at = min(self._propose_at, record.propose_at)

    def _record_time(self, plan: Plan, batch: Batch, result: StepResult, times: StepTimes) -> None:
        """Record how long a step of decode rows took. This is an observer of the engine."""
        if self._foreign.pop(id(plan), None) is not None:
            return  # the draft tokens of other extensions cost something else
        if not plan.draft_tokens and batch.step % _PLAIN_SHARE:
            return  # plain steps are frequent: a sample of them is enough
        if not plan.only_decodes:
            return
        seconds = times.schedule + times.pack + times.execute + times.update
        num_accepted = sum(count for count, _ in accepted_of_drafts(plan, result.token_ids))
        self.goodput.record_step(len(plan.rows), plan.num_draft_tokens, num_accepted, seconds)


def prepare_speculation(config: "EngineConfig", model_config: "ModelConfig") -> PreparedFeature:
    """Return a feature that adds `Speculation` to an engine, with the proposer named in `config`.

    Raises `ValueError`, before any weight is read, if a draft model or head does not fit the model.
    """
    prepare: PrepareProposer = METHODS.get(config.speculative_config.method)
    proposer = prepare(config, model_config)

    def add_to(engine: "GuardedEngine") -> None:
        engine.add_extension(Speculation(engine, proposer.make))

    return PreparedFeature(add_to, proposer.second_model_memory)
