"""Execute steps in a pipeline, where rank 0 is in the last stage and computes in `collect`.

`forward` only announces a step to the other ranks, which start it at once. Rank 0's part, i.e. the
last layers and the sampling, runs when the engine loop collects the step. By then the loop has
launched the following steps, so that the earlier stages have work. The sampling parameters of a
sequence are also read only then, when earlier steps no longer use its slot.
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
    """A step that earlier stages are computing or have computed."""

    batch: Batch
    inputs: ForwardInputs
    sample_inputs: SampleInputs = field(default_factory=SampleInputs)


class PipelineExecutor(TensorParallelExecutor):
    """An executor of several stages, with rank 0's runner and the workers of all stages."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, *args: Any) -> None:
        check_stages(model_config, config.pipeline_parallel_size)
        self._launched: deque[Launched] = deque()  # steps that rank 0 has not computed yet
        self._is_traced = config.trace is not None
        super().__init__(config, model_config, *args)

    def forward(self, batch: Batch, inputs: ForwardInputs) -> Launched:
        self._workers.check()
        with self._recovery():
            self._announce(batch, inputs)
            self._launched.append(Launched(batch, inputs))
        return self._launched[-1]

    def sample(self, launched: Launched, inputs: SampleInputs) -> None:
        """Keep `inputs` until `collect`, because the model's last layers have not run yet."""
        launched.sample_inputs = inputs

    def collect(self, launched: Launched) -> StepResult:
        with self._recovery():
            while (first := self._launched.popleft()) is not launched:
                self._compute(first, is_wanted=False)  # cancelled
            handle = self._compute(launched)
            self.runner.sample(handle, launched.sample_inputs)
            result = self.runner.collect(handle)
            self._workers.check()  # see `TensorParallelExecutor.collect`
            if self._is_traced:
                span = [self.runner.context.pp.received_at, time.perf_counter()]
                self._workers.spans[launched.batch.step, 0] = span
        return result

    def spans(self, step: int) -> list[list[float]]:
        """Return, for each stage, when it started and finished a completed step, by its own clock.

        All stages have finished, but their reports may still be on the way. A step can be read
        once. The entry of a stage that reports nothing is [].
        """
        context, spans, deadline = self.runner.context, self._workers.spans, time.monotonic() + 1
        # The first rank of each stage; stage 0 has the last ranks.
        ranks = [context.tp.size * index for index in reversed(range(context.pp.num_stages))]
        while any((step, rank) not in spans for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.0002)
        return [spans.pop((step, rank), []) for rank in ranks]

    def cancel(self, handles: list[Launched]) -> None:
        """Compute launched steps without sampling, as other ranks wait for rank 0 in them."""
        with contextlib.suppress(Exception), self._recovery():  # an error ends the engine
            while self._launched:
                self._compute(self._launched.popleft(), is_wanted=False)

    def _compute(self, launched: Launched, is_wanted: bool = True) -> Any:
        """Compute rank 0's part of a step, up to the logits."""
        error, inputs = None, launched.inputs
        try:
            if is_wanted:
                self.runner.fill_slots(inputs.slot_updates)
        except BaseException as raised:  # raised below: the other ranks must not wait for this one
            error = raised
        self._is_amid_collectives = True
        handle = self.runner.forward(launched.batch, replace(inputs, slot_updates=[]))
        self._is_amid_collectives = False
        if error is not None:
            raise error
        return handle

    def _others_wait(self) -> bool:
        if not self._is_amid_collectives:
            self.cancel([])  # other ranks may wait in the launched steps, too
        return super()._others_wait()
