"""Structured output is an extension of the engine that masks tokens by grammars.

A request is held while its grammar is compiled. In every step a token mask is applied to its
logits. Where a grammar allows only one continuation, its tokens become draft tokens, which is
called *jump-forward decoding* (Zheng et al. 2023, "SGLang", section 4). Draft tokens of other
extensions are cut before the first token that the grammar forbids.
"""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError  # a separate class in Python 3.10
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanoserve.engine.draft_room import add_draft_tokens, max_draft_tokens, may_draft
from nanoserve.engine.executor import SampleInputs, StepResult
from nanoserve.engine.extension import Extension
from nanoserve.engine.plan import Plan, Row
from nanoserve.engine.sequence import Sequence
from nanoserve.features.structured.backends import make_compiler
from nanoserve.features.structured.config import StructuredOutputsConfig
from nanoserve.features.structured.constrained_sequence import ConstrainedSequence, GrammarMask
from nanoserve.features.structured.grammar import CompiledGrammar

if TYPE_CHECKING:
    from nanoserve.engine.llm_engine import LLMEngine

COMPILING = "its grammar is compiled"  # the reason for which a request is held
MOST_FORCED = 32  # jump-forward tokens per step
_TIME_LIMIT = 20.0  # seconds for compiling a grammar, and for loading the tokenizer before it
_WAIT = 0.005  # seconds, if there is nothing else to do


@dataclass
class Compilation:
    """A compilation in progress, for the held sequences of one request."""

    sequences: list[Sequence]
    future: "Future[CompiledGrammar]"
    deadline: float


class StructuredOutputs(Extension):
    """Keeps the grammars of sequences. It is created for the first request with a grammar."""

    def __init__(self, engine: "LLMEngine") -> None:
        config = engine.config
        self._engine, self._scheduler = engine, engine.scheduler
        self._options = config.structured_outputs_config or StructuredOutputsConfig()
        self._compiler = make_compiler(
            self._options, engine.tokenizer, engine.model_config.vocab_size
        )
        self._jumps_forward = self._options.jump_forward
        if self._jumps_forward is None:
            is_recurrent = bool(engine.model_config.recurrent_layers)
            self._jumps_forward = config.device == "cpu" and not is_recurrent
        self._is_async = config.async_scheduling
        self._guided: dict[
            Sequence, ConstrainedSequence
        ] = {}  # unfinished sequences with a grammar
        self._compilations: dict[Sequence, Compilation] = {}
        self._forced: dict[Sequence, list[int]] = {}  # jump-forward tokens in flight

    def on_add(self, seq: Sequence) -> str | None:
        """Start compiling the grammar; if it is not cached, hold the request."""
        if seq.params.structured_outputs is None or self._start([seq, *seq.siblings]):
            return None
        return COMPILING

    def on_step_start(self) -> None:
        """Release requests whose grammar is compiled, and fail those whose compilation failed."""
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
        """Leave a sequence out of the plan if it may jump forward after its pending token."""
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
            guided = self._guided.get(row.seq)  # None if it has ended, perhaps at one of these
            forced = self._forced.get(row.seq)
            is_jump = plan.draft_tokens.get(row.seq) is forced
            if guided is not None and forced is not None and is_jump:
                guided.count_jump(len(token_ids) > len(forced))

    def on_release(self, seq: Sequence) -> None:
        if seq.finished:
            self._guided.pop(seq, None)
            self._forced.pop(seq, None)

    def on_reset(self) -> None:
        """Restart the grammars of all sequences, including those whose end was undone.

        An exception may have left a grammar and its count of accepted tokens inconsistent.
        """
        self._forced.clear()
        self._guided.clear()
        requests = self._engine.output_processor.requests.values()
        unfinished = {seq for r in requests for seq in r.sequences if not seq.finished}
        compiling = [seq for each in self._compilations.values() for seq in each.sequences]
        waiting = unfinished.intersection(compiling)
        for seq in waiting:
            self._scheduler.hold(seq, COMPILING)  # if its end was undone, it had been released
        for request in requests:
            missing = unfinished.intersection(request.sequences) - waiting
            if missing and request.params.structured_outputs is not None:
                self._restart([seq for seq in request.sequences if seq in missing])

    def close(self) -> None:
        self._compiler.close()

    def _start(self, sequences: list[Sequence]) -> bool:
        """Start to compile the grammar of a request's sequences. Returns True if it is cached."""
        params = sequences[0].params.structured_outputs
        future = self._compiler.compile(params.source(self._options))
        if future.done() and future.exception() is None:
            self._add_grammars(sequences, future.result())
            return True
        # A request whose grammar cannot be compiled is queued as well, and fails in the next step.
        deadline = self._engine.clock() + _TIME_LIMIT
        self._compilations[sequences[0]] = Compilation(sequences, future, deadline)
        return False

    def _restart(self, sequences: list[Sequence]) -> None:
        if not self._start(sequences):
            for seq in sequences:
                self._scheduler.hold(seq, COMPILING)

    def _add_grammars(self, sequences: list[Sequence], compiled: CompiledGrammar) -> None:
        for seq in sequences:
            self._guided[seq] = ConstrainedSequence(seq, compiled.start())
            if self._stop_if_terminated not in seq.stop_conditions:
                seq.stop_conditions.append(self._stop_if_terminated)

    def _stop_if_terminated(self, seq: Sequence) -> tuple[str, str | None] | None:
        """Return an end if the grammar is terminated. It is one of `Sequence.stop_conditions`."""
        guided = self._guided.get(seq)
        if guided is None or seq.finish_reason not in (None, "length"):
            return None
        return ("stop", None) if guided.is_terminated() else None

    def _is_known(self, seq: Sequence) -> bool:
        """Return True if the request of `seq` was added, which an exception may have prevented."""
        request = self._engine.output_processor.requests.get(seq.request_id)
        return request is not None and seq in request.sequences

    def _end_compilation(self, compilation: Compilation) -> None:
        sequences = compilation.sequences
        try:
            self._add_grammars(sequences, compilation.future.result(timeout=0))
        except Exception as error:
            self._engine.fail(sequences[0].request_id, _reason(error))
        else:
            self._scheduler.release(sequences, COMPILING)

    def _extend_row(self, plan: Plan, index: int, row: Row) -> None:
        """Add jump-forward tokens to a row, and let the grammar cut other draft tokens."""
        seq, guided = row.seq, self._guided[row.seq]
        if self._may_jump(seq) and row.num_sampled and not seq.num_pending:
            most = min(MOST_FORCED, plan.budget, max_draft_tokens(self._scheduler, row))
            forced = guided.forced(most) if most > 0 else []
            if forced and add_draft_tokens(self._scheduler, plan, index, forced):
                self._forced[seq] = plan.draft_tokens[seq]
        plan.draft_filters[seq] = guided.legal

    def _may_jump(self, seq: Sequence) -> bool:
        """Return True if jump-forward tokens may follow the last token of `seq`."""
        is_guided = bool(self._jumps_forward) and seq in self._guided
        return is_guided and may_draft(self._scheduler, seq)


def _reason(error: Exception) -> Exception:
    """Return the error of a request whose grammar could not be compiled."""
    if isinstance(error, TimeoutError | FutureTimeoutError):
        return ValueError(
            f"structured_outputs: its grammar was not compiled within {_TIME_LIMIT:g} seconds"
        )
    if isinstance(error, ValueError):
        return ValueError(f"structured_outputs: {error}")
    return error
