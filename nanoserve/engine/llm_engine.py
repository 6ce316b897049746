"""The loop: schedule, run, update. It is handed its muscle and owns it."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.detokenizer import Tokenizer
from nanoserve.engine.executor import Executor
from nanoserve.engine.input_processor import InputProcessor, Prompt
from nanoserve.engine.interrupts import DeferredInterrupt
from nanoserve.engine.output_processor import OutputProcessor, Request
from nanoserve.engine.scheduler import Plan, Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.sampling_params import SamplingParams, SlotParams


@dataclass(frozen=True)
class StepTimes:
    """Seconds that one step spent in each part of the loop."""

    schedule: float
    pack: float
    execute: float
    update: float


StepObserver = Callable[[Plan, Batch, StepTimes], None]


class LLMEngine:
    """Takes requests at any time and advances all of them step by step.

    Every error in a request is a `ValueError` before it is queued, and leaves the engine as it was.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.executor = executor
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(
            config, model_config, tokenizer, executor.max_model_len
        )
        self.scheduler = Scheduler(config, executor.num_kv_blocks, executor.max_model_len)
        self.output_processor = OutputProcessor(tokenizer)
        self.observers: list[StepObserver] = []
        self._num_arrivals = self._num_packed = 0
        self._rng = random.Random(config.seed)
        self._closed = False
        self.undelivered: list[RequestOutput] = []  # what the next step returns first
        self._stats = EngineStats()

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
        self.add(self.prepare(request_id, prompt, params, priority))

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
    ) -> Request:
        """Check a request and make its sequences, without queueing them."""
        return self.input_processor.process(request_id, prompt, params, priority)

    def add(self, request: Request) -> None:
        """Queue what `prepare` made; now it gets its place in line and its seed."""
        if self._closed:
            raise ValueError("this engine is closed")
        with DeferredInterrupt():
            self.output_processor.add(request)
            seed = request.params.seed
            seed = self._rng.getrandbits(64) if seed in (None, -1) else int(seed)
            for seq in request.sequences:
                self._num_arrivals += 1
                seq.arrival, seq.seed = self._num_arrivals, seed
            self.scheduler.add(request.sequences[0])

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free when this returns.

        Returns what it has produced so far, with finish reason "abort"; None for an id that is
        unknown or has finished already, which is no error: the two may cross.
        """
        with DeferredInterrupt():
            return self.output_processor.abort(request_id, self.scheduler.finish)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything left to compute or to hand out."""
        return self.scheduler.has_unfinished() or bool(self.undelivered)

    def step(self) -> list[RequestOutput]:
        """Advance every planned sequence; returns what finished and what streams.

        If anything raises, the step is undone: its sequences wait to be computed again. A Ctrl-C
        is raised when the step is over; what the step has finished comes with the next one.
        """
        with DeferredInterrupt():
            if self.scheduler.has_unfinished():
                self._advance()
        outputs, self.undelivered = self.undelivered, []
        return outputs

    def _advance(self) -> None:
        start = time.perf_counter()
        plan = Plan()
        try:
            self.scheduler.schedule(plan)
            assert plan.num_new_tokens, "every admitted sequence fits alone: no plan is empty"
            scheduled = time.perf_counter()
            batch = self._pack(plan)
            packed = time.perf_counter()
            changes = [_slot_params(seq) for seq in plan.admitted]
            result = self.executor.collect(self.executor.submit(batch, changes))
            executed = time.perf_counter()
            advanced = self.scheduler.update(plan, result.token_ids)
        except BaseException:
            self.scheduler.rollback(plan)
            raise
        self._stats.num_steps += 1
        self._stats.num_computed_tokens += sum(plan.num_new_tokens.values())
        for output in self.output_processor.process(plan, result, advanced, self.scheduler.finish):
            self.undelivered.append(output)
            if output.finished:
                self._stats.num_prompt_tokens += len(output.prompt_token_ids)
                self._stats.num_output_tokens += output.metrics.num_output_tokens
        times = StepTimes(
            scheduled - start, packed - scheduled, executed - packed, time.perf_counter() - executed
        )
        for observer in self.observers:
            observer(plan, batch, times)

    def close(self) -> None:
        """Abort what is left and release the executor's memory."""
        for request_id in list(self.output_processor.requests):
            self.abort_request(request_id)
        self._closed = True
        self.executor.close()

    def _pack(self, plan: Plan) -> Batch:
        # Counts also the steps that fail: with one number, two batches could be mistaken.
        step, self._num_packed = self._num_packed, (self._num_packed + 1) % 2**31
        batch = self.executor.batches[step % 2]
        batch.pack(plan, self.scheduler.block_tables, self.config.block_size, step)
        return batch


def _slot_params(seq: Sequence) -> SlotParams:
    return SlotParams(
        seq.slot,
        seq.params,
        seq.seed,
        seq.index,
        seq.token_ids[: seq.num_prompt_tokens],
        seq.output_token_ids,
        seq.stop_token_ids,
        seq.bad_words_token_ids,
    )
