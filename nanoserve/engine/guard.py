"""The guard around the engine loop: it may be shared, interrupted and called from anywhere.

- Threads may share an engine: one at a time is inside, the others wait.
- Ctrl-C waits for the end of a step. What must not wait, such as an abort from within a step, is
  deferred to its end.
- A step that raises has not happened: the loop is reset to the tokens of finished steps.
"""

import time
from collections import deque
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
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Request
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.text.tokenizer_protocol import Tokenizer


class GuardedEngine(EngineMethods):
    """An `LLMEngine` for use from outside: what `LLM.engine` is, and `nanoserve.LLMEngine`.

    Every error in a request is a `ValueError` before it is queued, and leaves the engine as it was.
    The arguments are those of `LLMEngine`, and make_executor: makes another executor from a
    configuration, for an engine that has slept.
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
        self.refusal: str | None = None  # the state of an engine that takes no requests
        self._lock = EngineLock()
        self._unclaimed = loop.outputs.unclaimed
        # The parts of the loop, to look at between two steps.
        self.config, self.model_config = config, model_config
        self.tokenizer, self.clock, self.make_executor = tokenizer, clock, make_executor
        self.input_processor, self.scheduler = loop.input_processor, loop.scheduler
        self.output_processor, self.extensions = loop.output_processor, loop.extensions
        self.observers, self.listeners = loop.observers, loop.listeners

    @property
    def executor(self) -> Executor:
        return self.loop.executor

    @property
    def stats(self) -> EngineStats:
        """Totals up to now; a later step does not change what is returned."""
        return self.loop.stats

    @property
    def plans_under_way(self) -> list[Plan]:
        """The plans of steps that were launched and not collected, oldest first."""
        return self.loop.plans_under_way

    @property
    def is_stepping(self) -> bool:
        """True if the caller is called from inside this engine."""
        return self._lock.is_inside

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request: text, token ids, or `{"prompt": ...}` / `{"prompt_token_ids": ...}`."""
        self.add(self.input_processor.process(request_id, prompt, params, priority))

    def add(self, request: Request) -> None:
        """Queue what `input_processor` made."""
        with self._lock.turn():
            if self.refusal is not None:
                raise ValueError(f"this engine is {self.refusal}")
            held_for = self.loop.prepare(request)
            with self._recovery():
                self.loop.enqueue(request, held_for)

    def add_extension(self, extension: Extension) -> None:
        """Let an extension take part in the engine's steps from the next one on."""
        with self._lock.turn():
            self.extensions.append(extension)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free when this returns.

        Returns what it has produced so far, with finish reason "abort"; None for an id that is
        unknown or has finished already, which is no error: the two may cross. During a step, as
        from a logits processor, an observer or another thread, it is aborted when the step is over,
        which then returns the output. So does the next step if earlier outputs wait for it, because
        a step has raised.
        """
        return self._lock.call_soon(
            lambda: self._abort(request_id), deferred=lambda: self._abort(request_id, True)
        )

    def subscribe(self, request_id: str) -> "deque[RequestOutput]":
        """Return a queue that gets the outputs of a request, which `step` then leaves out.

        To be called before the request is added; `withdraw` ends it.
        """
        return self.loop.outputs.subscribe(request_id)

    def is_subscribed(self, request_id: str) -> bool:
        return self.loop.outputs.is_subscribed(request_id)

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Abort these requests, and drop their outputs and queues.

        A stream that the garbage collector ends may call this at any moment, in any thread.
        """
        gone = frozenset(request_ids)
        self._lock.call_soon(lambda: self._withdraw(gone))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Evict all cached prefixes; returns True.

        What runs keeps its own blocks; with `reset_running_requests` it computes its tokens again.
        Raises `ValueError` for `reset_connector`: there is no KV connector.
        """
        if reset_connector:
            raise ValueError("reset_connector=True: this engine has no KV connector; leave it out")
        self._lock.call_soon(lambda: self._reset_prefix_cache(reset_running_requests))
        return True

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has anything left to compute or to hand out."""
        with self._lock.turn():
            return bool(self.scheduler.has_unfinished() or self.loop.outputs)

    def step(self, fetch: bool = True) -> list[RequestOutput]:
        """Advance every planned sequence; returns what finished and what streams.

        Outputs of a subscribed request go to its queue; a subscriber need not `fetch` those of
        others. If anything raises, what is under way has not happened: all sequences wait to be
        computed again, and the error's `request_ids` name the requests of those steps. A Ctrl-C is
        raised when the step is over; what it has finished comes with the next one.
        """
        if self.is_stepping:
            raise RuntimeError("step() was called from inside a step, which is not over")
        outputs: list[RequestOutput] = []
        try:
            with self._lock.turn(gives_way=True):
                with self._recovery():
                    finished = self.loop.advance()
                self.loop.report(finished)
                self._lock.run_deferred()
                if fetch:
                    outputs[:] = self._unclaimed
                    del self._unclaimed[:]
        except BaseException:  # such as a Ctrl-C that waited: the caller gets nothing now
            self._unclaimed[:0] = outputs  # no call, at which a second Ctrl-C could come
            raise
        return outputs

    def suspend(self, state: str) -> None:
        """Refuse requests from now on: "this engine is {state}"."""
        self.refusal = state

    def resume(self) -> None:
        """Take requests again."""
        self.refusal = None

    def replace_executor(self, executor: Executor) -> None:
        """Use another executor, of the same pool, in the place of one that was closed."""
        self.loop.replace_executor(executor)

    def close(self) -> None:
        """Abort what is left and release the executor's memory; inside a step, at its end."""
        self._lock.call_soon(self._close)

    @contextmanager
    def _recovery(self) -> Iterator[None]:
        """Whatever is raised in this block, the loop is left at the end of its last step."""
        try:
            yield
        except BaseException as error:
            with DeferredInterrupt(gives_way=False):
                error.request_ids = self.loop.reset()
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in a step of the requests {error.request_ids}")
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

    def _reset_prefix_cache(self, reset_running_requests: bool) -> None:
        with self._recovery():
            self.loop.reset_prefix_cache(reset_running_requests)

    def _close(self) -> None:
        self._withdraw(list(self.output_processor.requests))
        self.suspend("closed")
        self.loop.close()
