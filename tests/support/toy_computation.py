"""A computation without a model: hidden states are what a test says."""

from torch import Tensor

from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cpu_device import Computation, Forward


def toy_computation(forward: Forward, last_token: Tensor) -> Computation:
    """Of blocks of 4 tokens, and at most 32 in a sequence."""

    class Toy(Computation):
        def forward(self, tensors: BatchTensors, header: BatchHeader, tables: Tensor) -> Tensor:
            return forward(tensors, header, tables)

    return Toy(None, None, None, last_token, block_size=4, max_model_len=32)
