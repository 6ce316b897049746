"""What a device does for a runner, and how a CPU does it.

A runner knows the model and the order of a step; its device knows where the batch lies, what is
waited for, and what can be replayed. It is given values and functions, and never the runner to
keep. A CPU reads a batch where it was packed, and what is launched there is done; a GPU
(`nanoserve.worker.cuda_device`) gives every method another answer.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.attention.kv_cache import KVCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.executor import Executor
from nanoserve.models.layers.context import ParallelContext
from nanoserve.sampling.sampler import Sampler
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.kv_cache import decide_num_kv_blocks, physical_memory_bytes
from nanoserve.worker.threads import threads


@dataclass(frozen=True)
class Computation:
    """What a step computes with. A graph records it, so it is valid while these tensors are.

    last_token: int32 [max_num_seqs + 1], by slot, the token that was sampled last: the input of a
        step ahead, before the host knows it. The last place is for tokens of padding rows.
    """

    model: nn.Module
    kv_caches: list[KVCache]  # of the layers here
    sampler: Sampler
    last_token: Tensor
    block_size: int
    max_model_len: int

    def forward(
        self,
        tensors: BatchTensors,
        header: BatchHeader,
        block_tables: Tensor,
        is_mixed: bool = False,
    ) -> Tensor:
        """Return the hidden states of a step, [num_tokens, hidden_size].

        is_mixed: see `BatchTensors.attention_metadata`.
        """
        metadata = tensors.attention_metadata(header, block_tables, is_mixed)
        return self.model(tensors.input_ids[: header.num_tokens], self.kv_caches, metadata)

    def keep(self, token_ids: Tensor, slots: Tensor) -> None:
        """Put sampled tokens, int64 [num_rows], where a step ahead finds them by slot."""
        # Also what is no token must be one to the step ahead, whose row is thrown away.
        self.last_token[slots] = token_ids.clamp(min=0).int()


class StepOutput(NamedTuple):
    """What a device has launched of a step.

    tensors: the batch on the device. hidden: [num_tokens or more, hidden_size]; the wanted rows are
    `tensors.output_rows`, and a graph's next replay overwrites them. token_ids: int64
    [num_sampled], if a graph has chosen them too.
    """

    tensors: BatchTensors
    hidden: Tensor
    token_ids: Tensor | None = None


class Device(Protocol):
    """One device of a runner, as `CpuDevice` and `CudaDevice` implement it."""

    sampler_class: type[Sampler]

    def guard(self) -> AbstractContextManager[Any]:
        """Return a context in which work is launched on this device, whatever the caller chose."""

    def memory_bytes(self, parallel: ParallelContext) -> int:
        """Return all the memory that a rank may ever have."""

    def num_kv_blocks(
        self, config: EngineConfig, model_config: ModelConfig, block_bytes: int, memory_bytes: int
    ) -> int | None:
        """Return the number of KV blocks if it is known before the weights are loaded, else None.

        block_bytes: of a block on this rank. memory_bytes: all that the rank has. Raises
        `ValueError` for what can be refused by then.
        """

    def measure_kv_blocks(
        self,
        model_config: ModelConfig,
        block_bytes: int,
        parallel: ParallelContext,
        make_executor: Callable[[], Executor],
    ) -> int:
        """Return the number of KV blocks where it was not known before, now that weights are there.

        `make_executor` makes one with a KV cache of a single block, to measure a step.
        """

    def prepare(self, layout: BatchLayout, computation: Computation) -> None:
        """Allocate what batches of `layout` are copied to; graphs will record `computation`."""

    def warm_up(self, executor: Executor) -> None:
        """Do what would otherwise be done while serving: compile, by steps of dummy rows; capture.

        Every rank does the same, since a step of one is a step of all.
        """

    def drop_programs(self) -> None:
        """Drop graphs, and what they were recorded of, because its tensors are about to go."""

    def host_memory(self, num_bytes: int) -> np.ndarray:
        """Return memory, uint8, from which a batch can be copied without waiting."""

    def lock(self, memory: np.ndarray) -> None:
        """Make it so for memory that comes from elsewhere, and takes the place of all before."""

    def wait_until_read(self, batch: Batch) -> None:
        """Wait until the last copy of this batch is over."""

    def run(
        self, batch: Batch, header: BatchHeader, last_token: Tensor, forward: "Forward"
    ) -> StepOutput:
        """Bring the batch to the device, with its pending tokens, and compute its hidden states."""

    def fetch(self, token_ids: Tensor) -> Any:
        """Start bringing sampled ids [num_rows] to the host."""

    def wait(self, fetched: Any) -> list[int]:
        """Wait until they are there, and all that was copied to the host before `fetch`."""

    def finish(self) -> None:
        """Wait for everything that was launched."""

    def release_unused(self) -> None:
        """Give memory that no tensor uses back to the system."""

    def close(self) -> None:
        """Release the buffers and the graphs."""


# (tensors, header, block tables) -> hidden states [num_tokens, hidden_size]
Forward = Callable[[BatchTensors, BatchHeader, Tensor], Tensor]


class CpuDevice:
    """The CPU. `is_compiled` is whether numba compiles what the model is made of."""

    def __init__(
        self,
        num_threads: int | None = None,
        sampler_class: type[Sampler] = Sampler,
        is_compiled: bool = False,
    ) -> None:
        self.sampler_class = sampler_class
        self._num_threads, self._is_compiled = num_threads, is_compiled
        self._tensors: dict[Batch, BatchTensors] = {}
        self._prepared: tuple[BatchLayout, Computation] | None = None
        self._pid = os.getpid()

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._num_threads is None else threads(self._num_threads)

    def memory_bytes(self, parallel: ParallelContext) -> int:
        return physical_memory_bytes() // parallel.num_ranks

    def num_kv_blocks(
        self, config: EngineConfig, model_config: ModelConfig, block_bytes: int, memory_bytes: int
    ) -> int:
        return decide_num_kv_blocks(config, model_config, block_bytes, memory_bytes)

    def measure_kv_blocks(
        self,
        model_config: ModelConfig,
        block_bytes: int,
        parallel: ParallelContext,
        make_executor: Callable[[], Executor],
    ) -> int:
        raise RuntimeError("a CPU's KV cache is sized before the weights are loaded")

    def prepare(self, layout: BatchLayout, computation: Computation) -> None:
        self._prepared = layout, computation

    def warm_up(self, executor: Executor) -> None:
        if self._is_compiled:
            from nanoserve.worker.compile_ahead import compile_ahead

            layout, computation = self._prepared
            batch = Batch(layout, self.host_memory(layout.num_bytes))
            parts = computation.block_size, computation.model, computation.sampler
            compile_ahead(executor, batch, *parts)
            del self._tensors[batch]

    def drop_programs(self) -> None:
        self._prepared = None

    def host_memory(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, dtype=np.uint8)

    def lock(self, memory: np.ndarray) -> None:
        self._tensors.clear()

    def wait_until_read(self, batch: Batch) -> None:
        """Raise `RuntimeError` in a fork, where no step ends.

        A fork has none of its parent's threads: what waits for OpenMP's would wait for ever.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("this engine belongs to another process: instead of fork, use spawn")

    def run(
        self, batch: Batch, header: BatchHeader, last_token: torch.Tensor, forward: Forward
    ) -> StepOutput:
        if batch not in self._tensors:
            self._tensors[batch] = BatchTensors(batch.layout, torch.from_numpy(batch.memory))
        tensors = self._tensors[batch]
        if header.num_pending:
            tensors.fill_in_pending(header, last_token)
        return StepOutput(tensors, forward(tensors, header, tensors.packed_tables(header)))

    def fetch(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def wait(self, fetched: torch.Tensor) -> list[int]:
        return fetched.tolist()

    def finish(self) -> None:
        """Do nothing: what was launched is done."""

    def release_unused(self) -> None:
        """Do nothing: the system has it back."""

    def close(self) -> None:
        self._tensors.clear()
        self._prepared = None
