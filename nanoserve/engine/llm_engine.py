"""The loop: schedule, run, update. It is handed its muscle and owns it."""

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.engine_methods import EngineMethods
from nanoserve.engine.executor import Executor, SlotUpdate, StepResult
from nanoserve.engine.input_processor import InputProcessor, Prompt
from nanoserve.engine.interrupts import Turns, recovery
from nanoserve.engine.output_processor import OutputProcessor
from nanoserve.engine.plan import Plan
from nanoserve.engine.request import Request
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.stopwatch import StepTimes, Stopwatch
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.engine.tokenizer import Tokenizer


@dataclass
class Step:
    """A step under way."""

    plan: Plan
    batch: Batch
    times: StepTimes
    handle: Any = None
    outputs: list[RequestOutput] | None = None  # when it has ended


class LLMEngine(EngineMethods):
    """Takes requests at any time and advances all of them step by step.

    Every error in a request is a `ValueError` before it is queued, and leaves the engine as it was.
    Threads may share an engine: a call waits until another one is over. `clock` gives seconds, and
    is the only one that is read. Whoever builds the engine sets `guide`, which prepares it for a
    request with a grammar, and `make_executor`, which makes another muscle from a configuration.
    """

    guide: "Callable[[LLMEngine, Request], None]"
    make_executor: Callable[[EngineConfig], Executor]

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        tokenizer: "Tokenizer | None",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self.model_config = config, model_config
        self.executor, self.tokenizer, self.clock = executor, tokenizer, clock
        max_model_len = executor.max_model_len
        self.input_processor = InputProcessor(config, model_config, tokenizer, max_model_len, clock)
        self.scheduler = Scheduler(config, executor.num_kv_blocks, max_model_len)
        self.output_processor = OutputProcessor(tokenizer)
        self.observers: list[Callable[[Plan, Batch, StepTimes], None]] = []
        self._in_flight: deque[Step] = deque()  # launched and not collected, oldest first
        self._undelivered: list[RequestOutput] = []  # what the next step returns first
        self.mailboxes: dict[str, deque[RequestOutput]] = {}  # of requests that `step` leaves out
        self._turns = Turns()
        self._num_arrivals = 0
        self._rng = random.Random(config.seed)
        self._stats = EngineStats()
        self._watch = Stopwatch(clock)
        self.refusal: str | None = None  # what it is when it takes no requests

    @property
    def stats(self) -> EngineStats:
        """Totals up to now; a later step does not change what is returned."""
        return replace(
            self._stats,
            num_preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=self.scheduler.num_queried_tokens,
            prefix_cache_hits=self.scheduler.num_hit_tokens,
        )

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
        """Queue what `input_processor` made; now it gets its place in line and its seed."""
        with self._turns.turn():
            if self.refusal is not None:
                raise ValueError(f"this engine is {self.refusal}")
            if request.request_id in self.output_processor.requests:
                raise ValueError(f"request_id={request.request_id!r} is already in use")
            if request.params.structured_outputs is not None:
                self.guide(self, request)
            with recovery(self):
                seed = request.params.seed
                seed = self._rng.getrandbits(64) if seed in (None, -1) else int(seed)
                for seq in request.sequences:
                    self._num_arrivals += 1
                    seq.arrival, seq.seed = self._num_arrivals, seed
                self.scheduler.add(request.sequences[0])  # siblings follow when it has the prompt
                self.output_processor.requests[request.request_id] = request

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free when this returns.

        Returns what it has produced so far, with finish reason "abort"; None for an id that is
        unknown or has finished already, which is no error: the two may cross. During a step, as
        from a logits processor, an observer or another thread, it is aborted when the step is over,
        which then returns the output. So does the next step if earlier outputs wait for it, because
        a step has raised.
        """
        return self._turns.soon(
            lambda: self._abort(request_id), late=lambda: self._abort(request_id, is_late=True)
        )

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Leave nothing of these requests: neither what runs nor what nobody will fetch.

        A stream that the garbage collector ends may call this at any moment, in any thread.
        """
        self._turns.soon(lambda gone=frozenset(request_ids): self._withdraw(gone))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes; see `nanoserve.engine.prefix_reset`. Always True."""
        from nanoserve.engine.prefix_reset import reset

        self._turns.soon(lambda: reset(self, reset_running_requests))
        return True

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to compute or to hand out."""
        with self._turns.turn():
            return bool(self.scheduler.has_unfinished() or self._undelivered)

    @property
    def is_stepping(self) -> bool:
        """Whether the caller is called from inside this engine."""
        return self._turns.is_inside

    def step(self, fetch: bool = True) -> list[RequestOutput]:
        """Advance every planned sequence; returns what finished and what streams.

        Outputs of a request that has a mailbox go there, whoever steps; who waits for nothing else
        need not `fetch` those of others. If anything raises, what is under way has not happened:
        all sequences wait to be computed again, and the error's `request_ids` say whose step it
        was. A Ctrl-C is raised when the step is over; what it has finished comes with the next one.
        """
        if self.is_stepping:
            raise RuntimeError("step() was called from inside a step, which is not over")
        outputs: list[RequestOutput] = []
        try:
            with self._turns.turn(gives_way=True):
                if self.scheduler.has_unfinished():
                    for step in self._advance():
                        for observer in self.observers:
                            observer(step.plan, step.batch, step.times)
                self._turns.do_due()
                if fetch:
                    outputs, self._undelivered = self._undelivered, []
        except BaseException:  # such as a Ctrl-C that waited: the caller gets nothing now
            self._undelivered = outputs + self._undelivered
            raise
        return outputs

    def _advance(self) -> list[Step]:
        """One turn of the loop; the steps that have ended in it.

        With `async_scheduling` there is always a step under way: while the device computes it, its
        successor is planned and launched, so the device never waits for this loop.
        """
        finished, num_ahead = [], self.config.num_steps_ahead
        with recovery(self) as planned:
            # 1) Plan a step and launch the model. It needs no token of the step before: where one
            #    is still pending, the device takes it from where sampling has left it.
            self._watch.start()
            plan = self.scheduler.schedule()
            planned.append(plan)
            step = self._launch(plan) if plan.rows else None
            # 2) While that runs: the tokens of the step before.
            if self._in_flight and (step is None or len(self._in_flight) >= num_ahead):
                finished.append(self._finish_step())
            # 3) Sample, which may depend on those tokens, as penalties do.
            if step is not None:
                self.executor.sample(step.handle)
                self.scheduler.commit(plan)
                self._in_flight.append(step)
                self._watch.lap(step.times, "execute")
            # 4) Without a step ahead, wait for it at once.
            if len(self._in_flight) > num_ahead:
                finished.append(self._finish_step())
            self._give_up_idle_steps()
        return finished

    def _give_up_idle_steps(self) -> None:
        """What is under way for nobody any more is not waited for."""
        if not self.scheduler.has_unfinished():
            self._in_flight.clear()

    def _launch(self, plan: Plan) -> Step:
        self.output_processor.note_admitted(plan, self.clock())
        times = StepTimes()
        self._watch.lap(times, "schedule")
        batch = self.executor.next_batch()
        batch.pack(plan, self.scheduler.block_tables, self.config.block_size)
        self._watch.lap(times, "pack")
        sees_all = bool(self.config.logits_processors)
        changes = [SlotUpdate.of(s, sees_all or s.params.changes_logits) for s in plan.admitted]
        step = Step(plan, batch, times, self.executor.forward(batch, changes))
        self._watch.lap(times, "execute")
        return step

    def _finish_step(self) -> Step:
        """Wait for the oldest step's tokens and hand them out."""
        step = self._in_flight[0]
        result = self.executor.collect(step.handle)
        now = self._watch.lap(step.times, "execute")
        step.outputs = self._deliver(step.plan, result, now)
        # From here on it has happened, whatever comes between.
        for output in step.outputs:
            self.mailboxes.get(output.request_id, self._undelivered).append(output)
        self.output_processor.forget(step.outputs)
        self._in_flight.popleft()
        self._stats.count(step.plan.num_tokens, step.outputs)
        self._watch.lap(step.times, "update")
        return step

    def _deliver(self, plan: Plan, result: StepResult, now: float) -> list[RequestOutput]:
        """Give the sequences of a step their tokens; what there is to hand out of that."""
        joined = self.scheduler.update(plan, result.token_ids)
        return self.output_processor.process(plan, result, joined, self.scheduler.finish, now)

    def _abort(self, request_id: str, is_late: bool = False) -> RequestOutput | None:
        request = self.output_processor.requests.get(request_id)
        if request is None:
            return None
        with recovery(self):
            output = self.output_processor.abort(request, self.scheduler.finish, self.clock())
            self.output_processor.forget([output])
            self._give_up_idle_steps()
            waiting = self.mailboxes.get(request_id, self._undelivered)
            if is_late or any(earlier.request_id == request_id for earlier in waiting):
                waiting.append(output)
                return None
        return output

    def _withdraw(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._abort(request_id)
            self.mailboxes.pop(request_id, None)
        self._undelivered = [o for o in self._undelivered if o.request_id not in request_ids]

    def close(self) -> None:
        """Abort what is left and release the executor's memory; inside a step, at its end."""
        self._turns.soon(self._close)

    def _close(self) -> None:
        self._withdraw(list(self.output_processor.requests))
        self._in_flight.clear()
        self.refusal = "closed"
        self.executor.close()
