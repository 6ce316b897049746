"""What a step must not read: memory of the steps before it."""

import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.model_runner import ModelRunner


def poison_what_is_stale(runner: ModelRunner) -> None:
    """Before every step: the batch that is packed, and all of the device's buffers."""
    next_batch, buffers = runner.next_batch, runner.device.buffers
    copy_in = buffers.copy_in

    def poisoned_batch() -> Batch:
        batch = next_batch()
        batch.memory[:] = 0xAA  # negative integers
        return batch

    def poisoned_copy(batch: Batch, header: BatchHeader) -> torch.Tensor:
        buffers._memory.fill_(0x55)
        buffers._tables.fill_(2**30)  # no block has such a number
        return copy_in(batch, header)

    runner.next_batch, buffers.copy_in = poisoned_batch, poisoned_copy
