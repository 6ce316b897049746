"""The loop, with several tokens a row."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import Executor, StepResult
from nanoserve.engine.llm_engine import LLMEngine, Step
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.engine.stopwatch import StepTimes
from nanoserve.outputs import EngineStats, RequestOutput, TokenLogprobs
from nanoserve.speculative.methods import MakeProposer, prepare_proposer
from nanoserve.speculative.scheduler import AheadScheduler, SpeculativeScheduler

_PLAIN_SHARE = 4  # one in so many plain steps is timed


@dataclass
class SpeculativeStats(EngineStats):
    """And of guesses."""

    num_drafts: int = 0  # rows with guesses
    num_draft_tokens: int = 0  # guesses that were computed
    num_accepted_tokens: int = 0  # of which right
    num_accepted_tokens_per_pos: tuple[int, ...] = ()  # the first guesses, the second ones, ...


class SpeculativeEngine(LLMEngine):
    """An engine whose steps may yield several tokens of a sequence.

    They are handed on one by one, as if each had come in a step of its own: so a stop string ends
    an output at the very token, and a stream gets every token, as it would without guesses.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        *args: Any,
        make_proposer: MakeProposer,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, model_config, executor, *args, **kwargs)
        scheduler_class = AheadScheduler if config.async_scheduling else SpeculativeScheduler
        self.scheduler: SpeculativeScheduler = scheduler_class(
            config, executor.num_kv_blocks, executor.max_model_len
        )
        self.start_guessing(make_proposer, config.speculative_config.num_speculative_tokens)

    def start_guessing(self, make_proposer: MakeProposer, most_guesses: int) -> None:
        self.scheduler.proposer = make_proposer(self.executor, self.scheduler)
        self._stats = SpeculativeStats(**vars(self._stats))
        self._accepted_at = [0] * most_guesses
        if self.scheduler.goodput is not None:
            self.observers.append(self._note_time)

    @property
    def stats(self) -> SpeculativeStats:
        return replace(super().stats, num_accepted_tokens_per_pos=tuple(self._accepted_at))

    def _launch(self, plan: Plan) -> Step:
        step = super()._launch(plan)
        self._expect(plan)
        return step

    def _expect(self, plan: Plan) -> None:
        if plan.guesses:
            self.executor.expect({seq.slot: ids for seq, ids in plan.guesses.items()}, {})

    def _deliver(self, plan: Plan, result: StepResult, now: float) -> list[RequestOutput]:
        if not plan.guesses:
            outputs = super()._deliver(plan, result, now)
            if self.scheduler.proposer.needs_hidden:
                last = ((row.seq, output) for output, row in enumerate(plan.sampled))
                self._learn(last, result.hidden)
            return outputs
        rows = split_by_row(plan, result)
        outputs = super()._deliver(plan, _first_tokens(rows, result), now)
        for number in range(1, max(len(row.token_ids) for row in rows)):
            outputs += super()._deliver(*_further_tokens(rows, result, number), now)
        self.scheduler.settle(plan, [row.token_ids for row in rows])
        self._count(plan, rows)
        if self.scheduler.proposer.needs_hidden:
            last = ((row.row.seq, row.first_output + len(row.token_ids) - 1) for row in rows)
            self._learn(last, result.hidden)
        return outputs

    def _learn(self, outputs: Iterable[tuple[Sequence, int]], hidden: Any) -> None:
        """outputs: of each sequence, the one that its last token came of."""
        for seq, output in outputs:
            if seq.status is SequenceStatus.RUNNING:
                self.scheduler.proposer.learn(seq, hidden, output)

    def _close(self) -> None:
        try:
            super()._close()
        finally:
            self.scheduler.proposer.close()

    def _count(self, plan: Plan, rows: list["GuessedRow"]) -> None:
        for row in rows:
            if row.guesses:
                num_right = plan.num_right[row.row.seq] = max(0, len(row.token_ids) - 1)
                self.scheduler.note_guesses(row.row.seq, row.guesses, num_right)
                self._stats.num_drafts += 1
                self._stats.num_draft_tokens += len(row.guesses)
                self._stats.num_accepted_tokens += num_right
                for position in range(num_right):
                    self._accepted_at[position] += 1

    def _note_time(self, plan: Plan, batch: Batch, times: StepTimes) -> None:
        if not plan.guesses and batch.step % _PLAIN_SHARE:
            return  # there are enough of them
        num_rows, num_guesses = len(plan.rows), sum(map(len, plan.guesses.values()))
        if plan.num_tokens == num_rows + num_guesses and not plan.admitted and not plan.preempted:
            seconds = times.schedule + times.pack + times.execute + times.update
            num_right = sum(plan.num_right.values())
            self.scheduler.note_step(plan, num_rows, num_guesses, num_right, seconds)


def prepare_engine(config: EngineConfig, model_config: ModelConfig) -> Callable[..., LLMEngine]:
    """What makes the engine; raises `ValueError` if its proposer cannot be had."""
    make_proposer = prepare_proposer(config, model_config)
    return partial(SpeculativeEngine, make_proposer=make_proposer)


class GuessedRow(NamedTuple):
    """A row of a step that has guessed, and what it has got.

    first_output: its first one among those of the step. token_ids: up to the first one that was not
    guessed. error: why there is none. first_logprobs: the row of its first token in the step's
    log-probabilities, -1 if they were not asked for.
    """

    row: Row
    first_output: int
    guesses: list[int]
    token_ids: list[int]
    error: Exception | None
    first_logprobs: int


def split_by_row(plan: Plan, result: StepResult) -> list[GuessedRow]:
    """What of a step's outputs counts.

    An output means something if all guesses before it are what was sampled there. One without a
    token (its logits are not finite, say) ends what its row has got; if that is nothing, its
    request ends. Otherwise the next step comes to the same point, and no guess is before it.
    """
    rows: list[GuessedRow] = []
    output = num_logprobs = 0
    for row in plan.sampled:
        guesses, token_ids = plan.guesses.get(row.seq, []), []
        for index, new_ids in enumerate(result.token_ids[output : output + row.num_sampled]):
            token_ids += new_ids
            if index == len(guesses) or new_ids != [guesses[index]]:
                break
        error = None if token_ids else result.errors.get(output)
        is_asked = row.seq.params.logprobs is not None
        first_logprobs = num_logprobs if is_asked else -1
        rows.append(GuessedRow(row, output, guesses, token_ids, error, first_logprobs))
        output += row.num_sampled
        num_logprobs += row.num_sampled if is_asked else 0
    return rows


def _first_tokens(rows: list[GuessedRow], result: StepResult) -> StepResult:
    errors = {index: row.error for index, row in enumerate(rows) if row.error is not None}
    new_ids = [row.token_ids[:1] for row in rows]
    return StepResult(new_ids, _logprobs(rows, result, 0), errors, result.of_heads)


def _further_tokens(
    rows: list[GuessedRow], result: StepResult, number: int
) -> tuple[Plan, StepResult]:
    """As a step of the rows that have a token of this number, counted from 0."""
    rows = [row for row in rows if len(row.token_ids) > number]
    new_ids = [[row.token_ids[number]] for row in rows]
    plan = Plan(budget=0, rows=[row.row for row in rows])
    return plan, StepResult(new_ids, _logprobs(rows, result, number))


def _logprobs(rows: list[GuessedRow], result: StepResult, number: int) -> TokenLogprobs | None:
    if result.logprobs is None:
        return None
    chosen = [row.first_logprobs + number for row in rows if row.first_logprobs >= 0]
    values = result.logprobs
    return TokenLogprobs(values.token_ids[chosen], values.logprobs[chosen], values.ranks[chosen])
