"""An executor of one's own, without a model: every row gets token 7."""

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchLayout
from nanoserve.engine.executor import ForwardInputs, SampleInputs, StepResult


class SevenExecutor:
    num_kv_blocks, max_model_len = 8, 64

    def next_batch(self) -> Batch:
        layout = BatchLayout(max_num_tokens=64, max_num_rows=4, max_blocks_per_row=4)
        return Batch(layout, np.zeros(layout.num_bytes, np.uint8))

    def forward(self, batch: Batch, inputs: ForwardInputs) -> int:
        return batch.header.num_sampled

    def sample(self, handle: int, inputs: SampleInputs) -> None:
        pass

    def collect(self, handle: int) -> StepResult:
        return StepResult([[7]] * handle)

    def cancel(self, handles: list[int]) -> None:
        pass

    def close(self) -> None:
        pass
