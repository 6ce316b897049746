"""The engine loop: schedule, execute, update.

`LLMEngine` is the loop and nothing else. `nanoserve.engine.guard` wraps it so that threads may
share an engine, Ctrl-C waits for the end of a step, and a step that raises is rolled back.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.draft_tokens import accepted_of_drafts
from nanoserve.engine.executor import Executor, ForwardInputs, SampleInputs, SlotUpdate, StepResult
from nanoserve.engine.extension import EXTENSIONS, Extension
from nanoserve.engine.input_processor import InputProcessor
from nanoserve.engine.listeners import Listeners, RequestListener
from nanoserve.engine.output_processor import OutputProcessor
from nanoserve.engine.output_queues import OutputQueues
from nanoserve.engine.plan import Plan
from nanoserve.engine.policy import make_scheduler
from nanoserve.engine.request import Request
from nanoserve.engine.sequence import Sequence, SequenceStatus
from nanoserve.engine.stopwatch import StepTimes, Stopwatch
from nanoserve.outputs import EngineStats, RequestOutput

if TYPE_CHECKING:
    from nanoserve.text.detokenizer import Tokenizer

Observer = Callable[[Plan, Batch, StepResult, StepTimes], None]


@dataclass
class Step:
    """A step in flight; `result` and `outputs` are set when it has ended."""

    plan: Plan
    batch: Batch
    times: StepTimes
    handle: Any = None
    result: StepResult | None = None
    outputs: list[RequestOutput] | None = None


class LLMEngine:
    """Accepts requests at any time and advances all of them step by step.

    executor: runs the model; it is closed with the engine. tokenizer: None for token ids only.
    clock: returns seconds; no other clock is read. Requests are validated by `input_processor`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        tokenizer: "Tokenizer | None",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self.model_config = config, model_config
        self.executor = executor
        self.tokenizer, self.clock = tokenizer, clock
        max_model_len = executor.max_model_len
        self.input_processor = InputProcessor(config, model_config, tokenizer, max_model_len, clock)
        self.extensions: list[Extension] = []
        self.scheduler = make_scheduler(config, model_config, executor, self.extensions)
        self.output_processor = OutputProcessor(tokenizer)
        self.outputs = OutputQueues()
        self.observers: list[Observer] = []
        self.listeners: Listeners[RequestListener] = Listeners()
        self._on_demand: dict[str, Extension] = {}  # extensions that requests have needed so far
        # State that `reset` needs if an exception interrupts a step before it is in flight:
        self._planned: Plan | None = None  # names the requests of that step
        self._launched: Step | None = None  # has to be cancelled
        self._in_flight: deque[Step] = deque()  # launched and not collected, oldest first
        self.weights_id = 0  # of the weights in use: each other set of weights gets another number
        self._num_arrivals = 0
        self._rng = random.Random(config.seed)
        self._stats = EngineStats()
        self._watch = Stopwatch(clock)

    # ------------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Queue a request that `input_processor` has made.

        Raises `ValueError`, and queues nothing, if it cannot be accepted now.
        """
        self.enqueue(request, self.prepare(request))

    def prepare(self, request: Request) -> list[str]:
        """Check that a request can be queued; returns the reasons for which it will be held."""
        if request.request_id in self.output_processor.requests:
            raise ValueError(
                f"request_id={request.request_id!r} is already in use by an unfinished request"
            )
        for name in request.extensions:
            if name not in self._on_demand:
                self._on_demand[name] = EXTENSIONS.get(name)(self)
            if self._on_demand[name] not in self.extensions:
                # First in the list: later extensions must see its filters for draft tokens.
                self.extensions.insert(0, self._on_demand[name])
        try:
            reasons = [extension.on_add(request.sequences[0]) for extension in self.extensions]
        except BaseException:
            self._reject(request)
            raise
        return [reason for reason in reasons if reason is not None]

    def _reject(self, request: Request) -> None:
        """Let the extensions release what they hold for a request that one of them has rejected."""
        for seq in request.sequences:
            seq.status = SequenceStatus.FINISHED
            for extension in self.extensions:
                extension.on_release(seq)

    def enqueue(self, request: Request, held_for: Iterable[str]) -> None:
        """Queue a request: assign its position in the queue and its seed."""
        seed = request.params.seed
        seed = self._rng.getrandbits(64) if seed in (None, -1) else int(seed)
        for seq in request.sequences:
            self._num_arrivals += 1
            seq.arrival = self._num_arrivals
            seq.seed, seq.weights_id = seed, self.weights_id
        self.scheduler.add(request.sequences[0], held_for)  # siblings wait for its prompt
        self.output_processor.add(request)
        if self.listeners:
            self.listeners.notify(lambda listener: listener.on_start(request))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in any state; its blocks are free when this returns.

        Returns what it has produced, with finish reason "abort"; None for an unknown id.
        """
        request = self.output_processor.requests.get(request_id)
        if request is None:
            return None
        output = self.output_processor.end(request, None, self.scheduler.finish, self.clock())
        self._forget([output])
        self._discard_idle_steps()
        return output

    def fail(self, request_id: str, error: Exception) -> None:
        """End a request with finish reason "error"; the next step returns its output."""
        request = self.output_processor.requests[request_id]
        output = self.output_processor.end(request, error, self.scheduler.finish, self.clock())
        self.outputs.put([output])
        self._forget([output])

    # ------------------------------------------------------------------ the loop

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence; returns finished and streamed outputs."""
        self.report(self.advance())
        return self.outputs.take()

    def advance(self) -> list[Step]:
        """Run one turn of the loop; returns the steps that have ended in it.

        With `async_scheduling` there is always a step in flight: while the device computes it, its
        successor is planned and launched, so the device never waits for this loop.
        """
        finished: list[Step] = []
        if not self.scheduler.has_unfinished():
            return finished
        num_ahead = self.config.num_steps_ahead
        # 1) Plan a step and launch the model. The CPU need not know the tokens of the previous
        #    step: a token that is still pending is read from device memory.
        self._watch.start()
        plan = self._planned = self.scheduler.schedule()
        step = self._launch(plan) if plan.rows else None
        # 2) While the model runs, collect the tokens of the previous step.
        if self._in_flight and (step is None or len(self._in_flight) >= num_ahead):
            finished.append(self._finish_step())
        # 3) Launch the sampler. Penalties and grammars depend on the tokens collected in 2).
        if step is not None:
            self.executor.sample(step.handle, self._sample_inputs(plan))
            self.scheduler.commit(plan)
            self._in_flight.append(step)
            self._launched = None
            self._watch.lap(step.times, "execute")
        self._planned = None
        # 4) Without async scheduling, wait for the new step at once.
        if len(self._in_flight) > num_ahead:
            finished.append(self._finish_step())
        self._discard_idle_steps()
        return finished

    def report(self, steps: list[Step]) -> None:
        """Call the observers with the steps that have ended."""
        for step in steps:
            for observer in self.observers:
                observer(step.plan, step.batch, step.result, step.times)

    def _launch(self, plan: Plan) -> Step:
        self.output_processor.note_admitted(plan, self.clock())
        times = StepTimes()
        self._watch.lap(times, "schedule")
        batch = self.executor.next_batch()
        batch.pack(plan, self.scheduler.block_tables, self.config.block_size)
        self._watch.lap(times, "pack")
        inputs = self._forward_inputs(plan)
        step = self._launched = Step(plan, batch, times)
        step.handle = self.executor.forward(batch, inputs)
        self._watch.lap(times, "execute")
        return step

    def _forward_inputs(self, plan: Plan) -> ForwardInputs:
        inputs = ForwardInputs(
            [SlotUpdate.of(seq) for seq in plan.admitted],
            {seq.slot: token_ids for seq, token_ids in plan.draft_tokens.items()},
        )
        for extension in self.extensions:
            extension.forward_inputs(plan, inputs)
        return inputs

    def _sample_inputs(self, plan: Plan) -> SampleInputs:
        inputs = SampleInputs()
        for extension in self.extensions:
            extension.sample_inputs(plan, inputs)
        return inputs

    def _finish_step(self) -> Step:
        """Wait for the oldest step's tokens and store the outputs that they complete."""
        step = self._in_flight[0]
        plan = step.plan
        step.result = result = self.executor.collect(step.handle)
        now = self._watch.lap(step.times, "execute")
        joined = self.scheduler.update(plan, result.token_ids)
        for extension in self.extensions:
            extension.on_result(plan, result)
        finish = self.scheduler.finish
        step.outputs = self.output_processor.process(plan, result, joined, finish, now)
        # From here on the step counts as finished: an interrupt no longer reverts its tokens.
        self.outputs.put(step.outputs)
        self._forget(step.outputs)
        self._in_flight.popleft()
        self._stats.count(plan.num_tokens, step.outputs)
        if plan.draft_tokens:
            self._stats.count_drafts(accepted_of_drafts(plan, result.token_ids))
        self._watch.lap(step.times, "update")
        return step

    def _forget(self, outputs: Iterable[RequestOutput]) -> None:
        """Drop requests whose last output is among `outputs`, and notify the listeners."""
        for output in self.output_processor.forget(outputs):
            if self.listeners:
                # mypy cannot infer the type of a lambda that has a default.
                self.listeners.notify(lambda listener, last=output: listener.on_finish(last))  # type: ignore[misc]

    # ------------------------------------------------------------------ states

    @property
    def stats(self) -> EngineStats:
        """Totals up to now; later steps do not change the returned object."""
        return replace(
            self._stats,
            num_preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=self.scheduler.num_queried_tokens,
            prefix_cache_hits=self.scheduler.num_hit_tokens,
        )

    @property
    def plans_under_way(self) -> list[Plan]:
        """Plans of the steps that were launched and not collected, oldest first."""
        return [step.plan for step in self._in_flight]

    def reset(self) -> list[str]:
        """Roll back to the end of the last finished step; returns the affected request ids.

        These are the requests of the steps that were undone. For use after an exception at any
        line: tables that depend on each other may be half updated, so none of them is repaired. The
        results of unfinished steps are discarded, and every sequence recomputes its KV from the
        tokens of the finished steps. The recomputed steps sample the same tokens, because a sampled
        token does not depend on the step or the batch in which it is sampled.
        """
        steps, processor = list(self._in_flight), self.output_processor
        plans = [step.plan for step in steps]
        plans += [plan for plan in [self._planned] if plan is not None and plan not in plans]
        if steps and steps[0].outputs is not None:  # this step has finished
            self.outputs.put_missing(steps[0].outputs)
            self._forget(steps[0].outputs)
        elif steps:  # later steps have appended no tokens yet
            processor.revert_tokens(steps[0].plan)
        self._cancel_steps()
        processor.revert_ends()
        self.scheduler.reset(self._sequences())
        for extension in self.extensions:
            extension.on_reset()
        return sorted({row.seq.request_id for plan in plans for row in plan.rows})

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Evict all cached prefixes, which is needed after the weights have changed.

        Running sequences keep their blocks, which lookups no longer find; with
        `reset_running_requests` they recompute their KV, too, after the steps in flight have ended.
        """
        if reset_running_requests:
            self.finish_steps()
            preempted = list(self.scheduler.running)
            self.scheduler.reset(self._sequences())
            for seq in preempted:
                for extension in self.extensions:
                    extension.on_release(seq)
        self.scheduler.block_manager.prefix_cache.clear()

    def finish_steps(self) -> None:
        """Wait for the steps in flight, and keep their outputs for the next `step`."""
        while self._in_flight:
            self._finish_step()

    def begin_weights(self, version: int | str | None) -> None:
        """Note that the executor has other weights; no step may be in flight.

        Sequences that are added from now on share no KV blocks with earlier ones. `version` is the
        one in later outputs; None is the number of these weights.
        """
        self.weights_id += 1
        self.output_processor.begin_weights(self.weights_id if version is None else version)
        self.reset_prefix_cache()  # nothing could find its entries, which drafts take for useful

    def replace_executor(self, executor: Executor) -> None:
        """Replace a closed executor with another one that has a pool of the same size."""
        expected, found = self.executor.num_kv_blocks, executor.num_kv_blocks
        if found != expected:
            raise ValueError(
                f"the new executor has {found} KV blocks; the scheduler needs {expected}"
            )
        self.executor = executor

    def close(self) -> None:
        """Abort all unfinished requests and release the executor's memory."""
        for request_id in list(self.output_processor.requests):
            self.abort(request_id)
        self._cancel_steps()
        try:
            for extension in self.extensions:
                extension.close()
        finally:
            self.executor.close()

    def _sequences(self) -> list[Sequence]:
        requests = self.output_processor.requests.values()
        return [seq for request in requests for seq in request.sequences]

    def _discard_idle_steps(self) -> None:
        """Cancel the steps in flight if no request is left in them."""
        if self._in_flight and not self.scheduler.has_unfinished():
            self._cancel_steps()
            for extension in self.extensions:
                extension.on_reset()

    def _cancel_steps(self) -> None:
        steps, launched = list(self._in_flight), self._launched
        if launched is not None and not any(step is launched for step in steps):
            steps.append(launched)
        self._in_flight.clear()
        self._planned = self._launched = None
        if steps:
            self.executor.cancel([step.handle for step in steps if step.handle is not None])
