"""A guard around the engine loop, which may be shared, interrupted and called from anywhere.

- Threads may share an engine: one thread at a time is inside, and the other threads wait.
- Ctrl-C waits for the end of a step. A call that must not wait, such as an abort from within a
  step, is deferred to the end of that step.
- A step that raises is rolled back: the loop is reset to the tokens of finished steps.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.engine_methods import EngineMethods
from nanoserve.engine.executor import Executor
from nanoserve.engine.extension import Extension
from nanoserve.engine.input_processor import Prompt
from nanoserve.engine.interrupts import DeferredInterrupt, EngineLock
from nanoserve.engine.llm_engine import LLMEngine
from nanoserve.engine.pause import Pause
from nanoserve.engine.request import Request
from nanoserve.lora_request import LoRARequest
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.text.detokenizer import Tokenizer


class GuardedEngine(EngineMethods):
    """A thread-safe `LLMEngine` for users: `LLM.engine`, exported as `nanoserve.LLMEngine`.

    Every error in a request raises `ValueError` before the request is queued, and leaves the engine
    unchanged. It takes the arguments of `LLMEngine`. In addition, `make_executor` creates a new
    executor from a configuration, for an engine that has slept.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        tokenizer: "Tokenizer | None",
        clock: Callable[[], float] = time.perf_counter,
        make_executor: Callable[[EngineConfig], Executor] | None = None,
    ) -> None:
        loop = LLMEngine(config, model_config, executor, tokenizer, clock)
        self.loop = loop
        self.refusal: str | None = None  # why the engine rejects requests, such as "closed"
        self._lock, self.pause = EngineLock(), Pause()
        self._unclaimed = loop.outputs.unclaimed
        # Parts of the loop, which callers may read between two steps.
        self.config, self.model_config = config, model_config
        self.tokenizer, self.clock, self.make_executor = tokenizer, clock, make_executor
        self.input_processor, self.scheduler = loop.input_processor, loop.scheduler
        self.output_processor, self.extensions = loop.output_processor, loop.extensions
        self.observers, self.listeners = loop.observers, loop.listeners

    @property
    def executor(self) -> Executor:
        return self.loop.executor

    @property
    def is_stepping(self) -> bool:
        """True if the calling thread is inside this engine."""
        return self._lock.is_inside

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request: a string, token ids, or `{"prompt": ...}` / `{"prompt_token_ids": ...}`.

        lora_request: its adapter.

        Raises `ValueError` for an invalid request, and if the engine is suspended or closed.
        """
        process = self.input_processor.process
        self.add(process(request_id, prompt, params, priority, lora_request=lora_request))

    def add(self, request: Request) -> None:
        """Queue a request that `input_processor` has made."""
        with self._lock.turn():
            if self.refusal is not None:
                raise ValueError(f"this engine is {self.refusal}")
            held_for = self.loop.prepare(request)
            with self._recovery():
                self.loop.enqueue(request, held_for)

    def add_extension(self, extension: Extension) -> None:
        """Add an extension, which takes part in the steps from the next one on."""
        with self._lock.turn():
            self.extensions.append(extension)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its blocks are free when this returns.

        Returns what it has produced so far, with finish reason "abort"; None for an id that is
        unknown or has finished already, which is not an error: a request may finish just before it
        is aborted. During a step, for example from a logits processor, an observer or another
        thread, the request is aborted at the end of that step, which then returns the output. If
        outputs of the request still wait to be returned, because a step has raised, the next step
        returns this output after them.
        """
        return self._lock.call_soon(
            lambda: self._abort(request_id), deferred=lambda: self._abort(request_id, True)
        )

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Abort these requests, and drop their outputs and queues.

        A stream may call this when the garbage collector finalizes it: at any time, in any thread.
        """
        withdrawn = frozenset(request_ids)
        self._lock.call_soon(lambda: self._withdraw(withdrawn))

    def has_unfinished_requests(self) -> bool:
        """Return True if `step` has anything left to compute or to return."""
        with self._lock.turn():
            return bool(self.scheduler.has_unfinished() or self.loop.outputs)

    def step(self, fetch: bool = True) -> list[RequestOutput]:
        """Advance every scheduled sequence; returns finished and streamed outputs.

        Outputs of a subscribed request go to its queue; a subscriber steps with `fetch=False` and
        leaves all other outputs for later. If anything raises, the steps in flight are rolled back:
        all their sequences wait to be computed again, and the exception's `request_ids` are the
        requests of those steps. Ctrl-C is raised at the end of the step; the next step returns the
        outputs of this one. During a pause, no sequence is advanced: see `pause_scheduler`.
        """
        if self.is_stepping:
            raise RuntimeError(
                "step() was called from inside a step: wait until that step has ended"
            )
        outputs: list[RequestOutput] = []
        if self.pause.is_on and not self.loop.outputs:
            self.pause.wait_for_a_moment()  # outside: the thread that ends the pause needs a turn
        try:
            with self._lock.turn(gives_way=True):
                if not self.pause.is_on:
                    with self._recovery():
                        finished = self.loop.advance()
                    self.loop.report(finished)
                self._lock.run_deferred()
                if fetch:
                    outputs[:] = self._unclaimed
                    del self._unclaimed[:]
        except BaseException:  # such as a deferred Ctrl-C: the caller gets no outputs now
            self._unclaimed[:0] = outputs  # no function call, in which a second Ctrl-C could strike
            raise
        return outputs

    def suspend(self, state: str) -> None:
        """Reject requests from now on, with the error "this engine is {state}"."""
        self.refusal = state

    def resume(self) -> None:
        """Accept requests again."""
        self.refusal = None

    def close(self) -> None:
        """Abort all unfinished requests and release the executor's memory; deferred in a step."""
        self._lock.call_soon(self._close)

    @contextmanager
    def _recovery(self) -> Iterator[None]:
        """Reset the loop to the end of its last finished step if this block raises."""
        try:
            yield
        except BaseException as error:
            with DeferredInterrupt(gives_way=False):
                ids = error.request_ids = self.loop.reset()  # type: ignore[attr-defined]
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in a step of the requests {ids}")
            raise

    def _abort(self, request_id: str, is_deferred: bool = False) -> RequestOutput | None:
        with self._recovery():
            output, queues = self.loop.abort(request_id), self.loop.outputs
            if output is not None and (is_deferred or queues.has(request_id)):
                queues.put([output])
                return None
        return output

    def _withdraw(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)
        self.loop.outputs.drop(request_ids)

    def _close(self) -> None:
        self._withdraw(list(self.output_processor.requests))
        self.suspend("closed")
        self.loop.close()
