"""The loop: schedule, run, update. It is handed its muscle and owns it."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.detokenizer import Detokenizer, Tokenizer
from nanoserve.engine.executor import Executor, SlotParams
from nanoserve.engine.input_processor import InputProcessor, Prompt
from nanoserve.engine.scheduler import Plan, Scheduler
from nanoserve.engine.sequence import Sequence
from nanoserve.outputs import CompletionOutput, EngineStats, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams


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
        self.input_processor = InputProcessor(model_config, tokenizer, executor.max_model_len)
        self.scheduler = Scheduler(config, executor.num_kv_blocks, executor.max_model_len)
        self.detokenizer = Detokenizer(tokenizer)
        self.observers: list[StepObserver] = []
        self._sequences: dict[str, Sequence] = {}
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
    ) -> Sequence:
        """Check a request and make its sequence, without queueing it."""
        if self._closed:
            raise ValueError("this engine is closed")
        return self.input_processor.process(request_id, prompt, params, priority)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence that `prepare` made; now it gets its place in line and its seed."""
        if seq.request_id in self._sequences:
            raise ValueError(f"request_id={seq.request_id!r} is already in use")
        self._num_arrivals += 1
        seq.arrival = self._num_arrivals
        unseeded = seq.params.seed is None
        seq.seed = self._rng.getrandbits(64) if unseeded else int(seq.params.seed)
        self._sequences[seq.request_id] = seq
        self.scheduler.add(seq)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; its blocks are free when this returns.

        Returns what it has produced so far, with finish reason "abort"; None for an id that is
        unknown or has finished already, which is no error: the two may cross.
        """
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return None
        self.scheduler.abort(seq)
        return self._output(seq)

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
            changes = [SlotParams(seq.slot, seq.params, seq.seed) for seq in plan.admitted]
            result = self.executor.collect(self.executor.submit(batch, changes))
            executed = time.perf_counter()
            advanced = self.scheduler.update(plan, result.token_ids)
        except BaseException:
            self.scheduler.rollback(plan)
            raise
        self._stats.num_steps += 1
        self._stats.num_computed_tokens += sum(plan.num_new_tokens.values())
        outputs = self._outputs(advanced)
        times = StepTimes(
            scheduled - start, packed - scheduled, executed - packed, time.perf_counter() - executed
        )
        for observer in self.observers:
            observer(plan, batch, times)
        return outputs

    def close(self) -> None:
        """Abort what is left and release the executor's memory."""
        for request_id in list(self._sequences):
            self.abort_request(request_id)
        self._closed = True
        self.executor.close()

    def _pack(self, plan: Plan) -> Batch:
        step = self._stats.num_steps
        batch = self.executor.batches[step % 2]
        batch.pack(plan, self.scheduler.block_tables, self.config.block_size, step)
        return batch

    def _outputs(self, advanced: list[Sequence]) -> list[RequestOutput]:
        outputs = []
        for seq in advanced:
            if seq.finished:
                del self._sequences[seq.request_id]
                self._stats.num_prompt_tokens += seq.num_prompt_tokens
                self._stats.num_output_tokens += seq.metrics.num_output_tokens
            elif seq.params.output_kind is RequestOutputKind.FINAL_ONLY:
                continue
            outputs.append(self._output(seq))
        return outputs

    def _output(self, seq: Sequence) -> RequestOutput:
        token_ids = seq.output_token_ids
        if seq.params.output_kind is RequestOutputKind.DELTA:
            # A step advances a sequence by one token; one that stopped or was aborted got none.
            token_ids = token_ids[-1:] if seq.finish_reason in (None, "length") else []
        completion = CompletionOutput(
            index=0,
            text=self.detokenizer.update(seq),
            token_ids=token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )
        prompt_token_ids = seq.token_ids[: seq.num_prompt_tokens]
        return RequestOutput(
            seq.request_id, seq.prompt, prompt_token_ids, [completion], seq.finished, seq.metrics
        )
