"""Rank 0 of a pipeline: it is in the last stage, and takes part in a step when it is collected.

`forward` only tells the others of a step, which begin with it at once. What rank 0 does of it, its
layers and the sampling, waits until the loop collects it: by then the loop has launched the steps
behind it, so that the stages before have work. So a sequence's settings are read, too, when the
steps before have left its slot.
"""

import contextlib
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult
from nanoserve.features.parallel.pipeline_stage import check_stages
from nanoserve.features.parallel.tensor_parallel import TensorParallelExecutor


@dataclass
class Launched:
    """A step that the stages before this one compute, or have computed."""

    batch: Batch
    inputs: ForwardInputs
    sample_inputs: SampleInputs = field(default_factory=SampleInputs)


class PipelineExecutor(TensorParallelExecutor):
    """Rank 0's runner, and the workers of all stages."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, *args: Any) -> None:
        check_stages(model_config, config.pipeline_parallel_size)
        self._launched: deque[Launched] = deque()  # in which rank 0 has not taken part yet
        self._is_traced = config.trace is not None
        super().__init__(config, model_config, *args)

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Launched:
        self._workers.check()
        with self._recovery():
            self._workers.announce(batch)
            self._launched.append(Launched(batch, inputs))
        return self._launched[-1]

    def sample(self, launched: Launched, inputs: SampleInputs) -> None:
        """Keep `inputs` until `collect`: the model's last layers have not run."""
        launched.sample_inputs = inputs

    def collect(self, launched: Launched) -> StepResult:
        with self._recovery():
            while (first := self._launched.popleft()) is not launched:
                self._compute(first, is_wanted=False)  # cancelled
            handle = self._compute(launched)
            self.runner.sample(handle, launched.sample_inputs)
            result = self.runner.collect(handle)
            self._workers.check()  # as for tensor parallelism
            if self._is_traced:
                span = [self.runner.context.pp.received_at, time.perf_counter()]
                self._workers.spans[launched.batch.step, 0] = span
        return result

    def spans(self, step: int) -> list[list[float]]:
        """When each stage began with a step that is over, and when it had done: by its own clock.

        All have, but the news may be under way. Once; a stage that says nothing has none.
        """
        context, spans, deadline = self.runner.context, self._workers.spans, time.monotonic() + 1
        # The first rank of each stage; stage 0 has the last ranks.
        ranks = [context.tp.size * index for index in reversed(range(context.pp.num_stages))]
        while any((step, rank) not in spans for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.0002)
        return [spans.pop((step, rank), []) for rank in ranks]

    def cancel(self, handles: list[Launched]) -> None:
        """Compute what was launched without sampling: the others wait for rank 0 in these steps."""
        with contextlib.suppress(Exception), self._recovery():  # an error has ended the engine
            while self._launched:
                self._compute(self._launched.popleft(), is_wanted=False)

    def _compute(self, launched: Launched, is_wanted: bool = True) -> Any:
        """Compute rank 0's part of a step, up to the logits."""
        error, inputs = None, launched.inputs
        try:
            if is_wanted:
                self.runner.fill_slots(inputs.slot_updates)
        except BaseException as raised:  # the others must not wait for it
            error = raised
        self._is_amid_collectives = True
        handle = self.runner.forward(launched.batch, replace(inputs, slot_updates=[]))
        self._is_amid_collectives = False
        if error is not None:
            raise error
        return handle

    def _others_wait(self) -> bool:
        if not self._is_amid_collectives:
            self.cancel([])  # in those steps, too
        return super()._others_wait()
