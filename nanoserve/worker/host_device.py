"""The device of a runner: what a CPU does with a step, and how much memory it has."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.layers.context import ParallelContext
from nanoserve.sampling.sampler import Sampler
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.kv_cache import decide_num_kv_blocks, physical_memory_bytes
from nanoserve.worker.threads import threads

_COMPILED = (  # by numba
    "nanoserve.attention.numba",
    "nanoserve.kernels_cpu.integer_linear",
    "nanoserve.kernels_cpu.dequantized_linear",
)
# (tensors, header, block tables) -> hidden states [num_tokens, hidden_size]
Forward = Callable[[BatchTensors, BatchHeader, torch.Tensor], torch.Tensor]


class HostDevice:
    """Buffers, copies and waiting. A CPU reads a batch where it was packed, and what is launched is
    done; a GPU (`nanoserve.worker.cuda_device`) gives every method another answer.
    """

    sampler_class = Sampler

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._tensors: dict[Batch, BatchTensors] = {}
        self._pid = os.getpid()

    def guard(self) -> AbstractContextManager[Any]:
        """A context in which work is launched on this device, whatever the caller chose."""
        return nullcontext() if self._num_threads is None else threads(self._num_threads)

    def memory_bytes(self, parallel: ParallelContext) -> int:
        """All that a rank may ever have."""
        return physical_memory_bytes() // parallel.num_ranks

    def pool_before_loading(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parallel: ParallelContext,
        block_bytes: int,
    ) -> int | None:
        """Return the number of KV blocks, if it is known before the weights are loaded."""
        memory_bytes = self.memory_bytes(parallel)
        return decide_num_kv_blocks(config, model_config, block_bytes, memory_bytes)

    def pool_after_loading(self, runner: Any) -> int:
        """Return the number of KV blocks, computed after the weights are loaded."""
        raise NotImplementedError

    def make_room(self, layout: BatchLayout) -> None:
        """Allocate what batches are copied to."""

    def host_memory(self, num_bytes: int) -> np.ndarray:
        """uint8, from which a batch can be copied without waiting."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def lock(self, memory: np.ndarray) -> None:
        """Make it so for memory that comes from elsewhere, and takes the place of all before."""
        self._tensors.clear()

    def warm_up(self, runner: Any) -> None:
        """Whatever would otherwise be done while serving: compiling, capturing."""
        # All ranks must run the model, or none: so this looks at nothing of the process.
        method = runner.context.linear_method
        parts = (runner.context.attention, getattr(method, "make_integer", None))
        if any(getattr(part, "__module__", None) in _COMPILED for part in parts):
            from nanoserve.worker.compile_ahead import compile_ahead

            compile_ahead(runner)

    def wait_until_read(self, batch: Batch) -> None:
        """Until the last copy of this batch is over; `RuntimeError` in a fork, where none ends.

        A fork has none of its parent's threads: what waits for OpenMP's would wait for ever.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this engine belongs to another process: instead of fork, use spawn")

    def run(
        self, batch: Batch, header: BatchHeader, last_token: torch.Tensor, forward: Forward
    ) -> tuple[BatchTensors, torch.Tensor]:
        """Bring the batch to the device, with its pending tokens, and compute its hidden states."""
        if batch not in self._tensors:
            self._tensors[batch] = BatchTensors(batch.layout, torch.from_numpy(batch.memory))
        tensors = self._tensors[batch]
        if header.num_pending:
            tensors.fill_in_pending(header, last_token)
        return tensors, forward(tensors, header, tensors.packed_tables(header))

    def fetch(self, token_ids: torch.Tensor) -> Any:
        """Start bringing sampled ids [num_rows] to the host."""
        return token_ids

    def wait(self, fetched: Any) -> list[int]:
        """Until they are there."""
        return fetched.tolist()

    def drop_recorded(self) -> None:
        """Drop graphs of tensors that are about to go; `warm_up` records them again."""

    def finish(self) -> None:
        """Wait for everything that was launched."""

    def close(self) -> None:
        """Release the buffers."""
        self._tensors.clear()
