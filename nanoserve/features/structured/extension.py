"""Structured output as an extension of the engine: grammars bound what a sequence may say.

A request is held while its grammar is compiled. In every step its tokens get a mask, and where a
grammar leaves only one way on, the tokens that must come are draft tokens: *jump-forward decoding*
(Zheng et al. 2023, "SGLang", section 4). Draft tokens of other extensions are cut where the grammar
forbids them.
"""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError  # of Python 3.10 its own
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoserve.engine.draft_room import add_draft_tokens, max_draft_tokens, may_draft
from nanoserve.engine.executor import SampleInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.features.structured.backends import make_compiler
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.constrained_sequence import GrammarMask, Guided
from nanoserve.features.structured.grammar import CompiledGrammar

if TYPE_CHECKING:
    from nanoserve.engine.llm_engine import LLMEngine

COMPILING = "its grammar is compiled"  # a reason to be held
MOST_FORCED = 32  # jump-forward tokens that one step takes
_TIME_LIMIT = 20.0  # seconds for a grammar to be compiled, and the tokenizer to be read before
_WAIT = 0.005  # seconds, where there is nothing else to do


@dataclass
class Compilation:
    """A grammar that is compiled for held sequences of one request."""

    sequences: list[Sequence]
    future: "Future[CompiledGrammar]"
    deadline: float


class StructuredOutputs(Extension):
    """Keeps a grammar for each sequence that has one; made when the first such request comes."""

    def __init__(self, engine: "LLMEngine") -> None:
        config = engine.config
        self._engine, self._scheduler = engine, engine.scheduler
        self._options = config.structured_outputs_config or StructuredOutputsConfig()
        self._compiler = make_compiler(
            self._options, engine.tokenizer, engine.model_config.vocab_size
        )
        self._jumps_forward = self._options.jump_forward
        if self._jumps_forward is None:
            self._jumps_forward = config.device == "cpu"
        self._is_async = config.async_scheduling
        self._guided: dict[Sequence, Guided] = {}  # sequences with a grammar that have not ended
        self._compilations: dict[Sequence, Compilation] = {}
        self._forced: dict[Sequence, list[int]] = {}  # jump-forward tokens under way

    def on_add(self, seq: Sequence) -> str | None:
        """Have the grammar compiled; if that takes time, the request is held."""
        if seq.params.structured_outputs is None or self._start([seq, *seq.siblings]):
            return None
        return COMPILING

    def on_step_start(self) -> None:
        """Release requests whose grammar is compiled, and fail those that will get none."""
        if not self._compilations:
            return
        scheduler, waiting = self._scheduler, list(self._compilations.items())
        if not (scheduler.waiting or scheduler.running or self._engine.plans_under_way):
            wait([each.future for _, each in waiting], _WAIT, FIRST_COMPLETED)
        for seq, each in waiting:
            is_late = self._engine.clock() > each.deadline
            if seq.finished or not self._is_known(seq):
                del self._compilations[seq]  # aborted, or it was never queued
            elif each.future.done() or is_late:
                self._end_compilation(each)
                del self._compilations[seq]

    def limit_tokens(self, seq: Sequence, num_tokens: int, plan: Plan) -> int:
        """Leave a sequence out of the step ahead that may jump forward from its pending token."""
        if self._is_async and seq.num_pending and self._may_jump(seq):
            return 0
        return num_tokens

    def extend_plan(self, plan: Plan) -> None:
        for row in plan.rows:
            self._forced.pop(row.seq, None)
        if not plan.only_decodes:
            return
        for index, row in enumerate(plan.rows):
            if row.seq in self._guided:
                self._extend_row(plan, index, row)

    def sample_inputs(self, plan: Plan, inputs: SampleInputs) -> None:
        for row in plan.sampled:
            guided = self._guided.get(row.seq)
            if guided is not None:
                drafts = plan.draft_tokens.get(row.seq, [])
                if drafts is not self._forced.get(row.seq):
                    drafts = guided.legal(drafts)
                inputs.token_masks[row.seq.slot] = GrammarMask(guided, drafts)

    def on_result(self, plan: Plan, result: StepResult) -> None:
        if not self._forced:
            return
        for row, token_ids in zip(plan.sampled, result.token_ids, strict=True):
            guided = self._guided.get(row.seq)  # None if it has ended, perhaps amid these
            forced = self._forced.get(row.seq)
            is_jump = forced is not None and plan.draft_tokens.get(row.seq) is forced
            if guided is not None and is_jump:
                guided.count_jump(len(token_ids) > len(forced))

    def on_release(self, seq: Sequence) -> None:
        if seq.finished:
            self._guided.pop(seq, None)
            self._forced.pop(seq, None)

    def on_reset(self) -> None:
        """Start the grammars of all sequences anew, also where an end was undone.

        An exception may have come between what a grammar does and the note of it.
        """
        self._forced.clear()
        self._guided.clear()
        requests = self._engine.output_processor.requests.values()
        unfinished = {seq for r in requests for seq in r.sequences if not seq.finished}
        compiling = [seq for each in self._compilations.values() for seq in each.sequences]
        waiting = unfinished.intersection(compiling)
        for seq in waiting:
            self._scheduler.hold(seq, COMPILING)  # an end that was undone has released it
        for request in requests:
            missing = unfinished.intersection(request.sequences) - waiting
            if missing and request.params.structured_outputs is not None:
                self._restart([seq for seq in request.sequences if seq in missing])

    def close(self) -> None:
        self._compiler.close()

    def _start(self, sequences: list[Sequence]) -> bool:
        """Compile the grammar of these sequences of one request; False if that takes time."""
        params = sequences[0].params.structured_outputs
        future = self._compiler.compile(params.source(self._options))
        if future.done() and future.exception() is None:
            self._guide(sequences, future.result())
            return True
        # A request whose grammar cannot be compiled is queued, too, and ends with its first step.
        deadline = self._engine.clock() + _TIME_LIMIT
        self._compilations[sequences[0]] = Compilation(sequences, future, deadline)
        return False

    def _restart(self, sequences: list[Sequence]) -> None:
        if not self._start(sequences):
            for seq in sequences:
                self._scheduler.hold(seq, COMPILING)

    def _guide(self, sequences: list[Sequence], compiled: CompiledGrammar) -> None:
        for seq in sequences:
            self._guided[seq] = Guided(seq, compiled.start())
            if self._stop_if_terminated not in seq.stop_conditions:
                seq.stop_conditions.append(self._stop_if_terminated)

    def _stop_if_terminated(self, seq: Sequence) -> tuple[str, str | None] | None:
        """Return an end if the grammar lets nothing follow: one of `Sequence.stop_conditions`."""
        guided = self._guided.get(seq)
        if guided is None or seq.finish_reason not in (None, "length"):
            return None
        return ("stop", None) if guided.is_terminated() else None

    def _is_known(self, seq: Sequence) -> bool:
        """Return whether a sequence was queued; an exception may have come in between."""
        request = self._engine.output_processor.requests.get(seq.request_id)
        return request is not None and seq in request.sequences

    def _end_compilation(self, compilation: Compilation) -> None:
        sequences = compilation.sequences
        try:
            self._guide(sequences, compilation.future.result(timeout=0))
        except Exception as error:
            self._engine.fail(sequences[0].request_id, _reason(error))
        else:
            self._scheduler.release(sequences, COMPILING)

    def _extend_row(self, plan: Plan, index: int, row: Row) -> None:
        """Add jump-forward tokens to a row, and have draft tokens of others cut by the grammar."""
        seq, guided = row.seq, self._guided[row.seq]
        if self._may_jump(seq) and row.num_sampled and not seq.num_pending:
            most = min(MOST_FORCED, plan.budget, max_draft_tokens(self._scheduler, row))
            forced = guided.forced(most) if most > 0 else []
            if forced and add_draft_tokens(self._scheduler, plan, index, forced):
                self._forced[seq] = plan.draft_tokens[seq]
        plan.draft_filters[seq] = guided.legal

    def _may_jump(self, seq: Sequence) -> bool:
        """Return whether jump-forward tokens may follow the last token of a sequence."""
        is_guided = self._jumps_forward and seq in self._guided
        return is_guided and may_draft(self._scheduler, seq)


def _reason(error: Exception) -> Exception:
    """Return the error of a request whose grammar could not be compiled."""
    if isinstance(error, TimeoutError | FutureTimeoutError):
        return ValueError(f"structured_outputs: not compiled within {_TIME_LIMIT:g} seconds")
    if isinstance(error, ValueError):
        return ValueError(f"structured_outputs: {error}")
    return error
