"""The loop, with grammars: an engine becomes such a one when its first guided request arrives."""

from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError  # of Python 3.10 its own
from dataclasses import dataclass

from nanoserve.engine.interrupts import recovery
from nanoserve.engine.llm_engine import LLMEngine, Step
from nanoserve.engine.pipeline import pipelined
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence
from nanoserve.speculative.engine import SpeculativeEngine
from nanoserve.speculative.proposer import TextProposer
from nanoserve.structured.backends import make_compiler
from nanoserve.structured.compiler import Compiler
from nanoserve.structured.config import StructuredOutputsConfig
from nanoserve.structured.grammar import CompiledGrammar
from nanoserve.structured.guided import Guided, StepLimit
from nanoserve.structured.scheduler import MOST_FORCED, GuidedAheadScheduler, GuidedScheduler

_TIME_LIMIT = 20.0  # seconds for a grammar to be compiled, and the tokenizer to be read before
_WAIT = 0.005  # seconds, where there is nothing else to do


def start_guiding(engine: LLMEngine, request: Request) -> None:
    """Prepare `engine` for a guided request that is about to be queued.

    An engine that has had none is another one from here on: the same object, with the same queues,
    of a class whose methods know grammars. So whoever asks for none never pays for them.
    """
    if not isinstance(engine, GuidedEngine):
        guiding = engine.config.structured_outputs_config or StructuredOutputsConfig()
        compiler = make_compiler(guiding, engine.tokenizer, engine.model_config.vocab_size)
        engine.__class__ = GuidedEngine
        engine.start_guiding(guiding, compiler)
    engine.prepare(request)


@dataclass
class Compiling:
    """A request that waits for its grammar."""

    request: Request
    future: "Future[CompiledGrammar]"
    deadline: float


class NoGuesses(TextProposer):
    """Who proposes where only grammars do."""

    def guess(self, seq: Sequence, most: int) -> list[int]:
        return []


class GuidedEngine(SpeculativeEngine):
    """An engine whose sequences may have a grammar."""

    scheduler: GuidedScheduler

    def start_guiding(self, guiding: StructuredOutputsConfig, compiler: Compiler) -> None:
        """Become one, between two steps."""
        config = self.config
        self._guiding, self._compiler = guiding, compiler
        self._compiling: dict[str, Compiling] = {}
        is_ahead = config.async_scheduling
        kind = GuidedAheadScheduler if is_ahead else GuidedScheduler
        self.scheduler.__class__ = kind if config.pipeline_parallel_size == 1 else pipelined(kind)
        if config.speculative_config is None:
            self.scheduler.start_guessing(config)
            self.start_guessing(lambda executor, scheduler: NoGuesses(), MOST_FORCED)
        num_places = max(len(self._accepted_at), MOST_FORCED)
        self._accepted_at += [0] * (num_places - len(self._accepted_at))
        adds_forced = self._guiding.jump_forward
        if adds_forced is None:
            adds_forced = config.device == "cpu"
        # Processors of the engine would see guesses as if they had been generated.
        self.scheduler.start_guiding(adds_forced and not config.logits_processors)

    def prepare(self, request: Request) -> None:
        """Have its grammar compiled; if that takes time, the request will be held."""
        source = request.params.structured_outputs.source(self._guiding)
        future = self._compiler.compile(source)
        if future.done() and future.exception() is None:
            self._guide(request, future.result())
        else:  # also to end it, if it cannot be compiled
            deadline = self.clock() + _TIME_LIMIT
            self._compiling[request.request_id] = Compiling(request, future, deadline)

    def _guide(self, request: Request, compiled: CompiledGrammar) -> None:
        for seq in request.sequences:
            self.scheduler.guided[seq] = Guided(seq, compiled.start())

    def _advance(self) -> list[Step]:
        if self._compiling:
            self._end_holds()
        return super()._advance()

    def _end_holds(self) -> None:
        """Queue the requests whose grammar is there, and fail those that will get none."""
        waiting, scheduler = self._compiling.values(), self.scheduler
        if not (scheduler.waiting or scheduler.running or self._in_flight):
            wait([one.future for one in waiting], _WAIT, FIRST_COMPLETED)
        for one in list(waiting):
            request, is_late = one.request, self.clock() > one.deadline
            if not (one.future.done() or is_late or request.finished):
                continue
            del self._compiling[request.request_id]
            if request.finished:
                continue  # aborted
            try:
                self._guide(request, one.future.result(timeout=0))
            except Exception as error:
                self._fail(request, _reason(error))
            else:
                self.scheduler.release(request.sequences[:1])

    def _fail(self, request: Request, error: Exception) -> None:
        with recovery(self):
            request.error, finish = error, self.scheduler.finish
            output = self.output_processor.abort(request, finish, self.clock(), "error")
            self.mailboxes.get(request.request_id, self._undelivered).append(output)
            self.output_processor.forget([output])

    def _expect(self, plan: Plan) -> None:
        guesses = {seq.slot: token_ids for seq, token_ids in plan.guesses.items()}
        limits = {
            seq.slot: StepLimit(self.scheduler.guided[seq], plan.guesses.get(seq, []))
            for seq, *_ in plan.sampled
            if seq in self.scheduler.guided
        }
        self.executor.expect(guesses, limits)  # also if there are none: those before have ended

    def _close(self) -> None:
        self._compiler.close()
        super()._close()


def _reason(error: Exception) -> Exception:
    """What a request ends with whose grammar could not be compiled."""
    if isinstance(error, TimeoutError | FutureTimeoutError):
        return ValueError(f"structured_outputs: not compiled within {_TIME_LIMIT:g} seconds")
    if isinstance(error, ValueError):
        return ValueError(f"structured_outputs: {error}")
    return error
