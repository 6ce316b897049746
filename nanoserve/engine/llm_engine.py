"""The loop: schedule, run, update. It is handed its muscle and owns it."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.detokenizer import Tokenizer
from nanoserve.engine.executor import Executor, SlotParams
from nanoserve.engine.input_processor import InputProcessor, Prompt
from nanoserve.engine.output_processor import OutputProcessor, Request
from nanoserve.engine.scheduler import Plan, Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import EngineStats, RequestOutput
from nanoserve.sampling_params import SamplingParams


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
        self._num_arrivals = 0
        self._rng = random.Random(config.seed)
        self._closed = False
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        stats, scheduler = self._stats, self.scheduler
        stats.num_preemptions = scheduler.num_preemptions
        stats.prefix_cache_queries = scheduler.num_queried_tokens
        stats.prefix_cache_hits = scheduler.num_hit_tokens
        return stats

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
        if self._closed:
            raise ValueError("this engine is closed")
        return self.input_processor.process(request_id, prompt, params, priority)

    def add(self, request: Request) -> None:
        """Queue what `prepare` made; now it gets its place in line and its seed."""
        self.output_processor.add(request)
        seed = request.params.seed
        seed = self._rng.getrandbits(64) if seed is None else int(seed)
        for seq in request.sequences:
            self._num_arrivals += 1
            seq.arrival, seq.seed = self._num_arrivals, seed
        self.scheduler.add(request.sequences[0])

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free when this returns.

        Returns what it has produced so far, with finish reason "abort"; None for an id that is
        unknown or has finished already, which is no error: the two may cross.
        """
        return self.output_processor.abort(request_id, self.scheduler.finish)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """Advance every planned sequence; returns what finished and what streams.

        If the executor raises, the step is undone: its sequences wait to be computed again.
        """
        if not self.has_unfinished_requests():
            return []
        start = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan.num_new_tokens, "every admitted sequence fits alone, so a plan is never empty"
        scheduled = time.perf_counter()
        try:
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
        outputs = self.output_processor.process(plan, result, advanced, self.scheduler.finish)
        for output in outputs:
            if output.finished:
                self._stats.num_prompt_tokens += len(output.prompt_token_ids)
                self._stats.num_output_tokens += output.metrics.num_output_tokens
        times = StepTimes(
            scheduled - start, packed - scheduled, executed - packed, time.perf_counter() - executed
        )
        for observer in self.observers:
            observer(plan, batch, times)
        return outputs

    def close(self) -> None:
        """Abort what is left and release the executor's memory."""
        for request_id in list(self.output_processor.requests):
            self.abort_request(request_id)
        self._closed = True
        self.executor.close()

    def _pack(self, plan: Plan) -> Batch:
        step = self._stats.num_steps
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
