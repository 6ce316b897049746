"""The interface between a runner and its device, with the implementation for a CPU.

A runner knows the model and the order of a step; its device knows where the batch is stored, when
to wait, and which steps can be replayed as graphs. A device is given values and functions; it never
keeps a reference to the runner. A CPU reads a batch in the memory in which it was packed, and a
call returns when its work is done; `nanoserve.worker.cuda_device` implements every method
differently.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.attention.recurrent_state import LayerCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.executor import Executor
from nanoserve.models.layers.context import ParallelContext
from nanoserve.sampling.sampler import Sampler
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.kv_cache import KVCacheLayout, decide_num_kv_blocks, physical_memory_bytes
from nanoserve.worker.threads import threads


@dataclass(frozen=True)
class Computation:
    """The objects that a step computes with. A graph that recorded them is valid while they exist.

    last_token: int32 [max_num_seqs + 1], by slot, the token that was sampled last: the input of the
        next step under async scheduling, before the host knows it. The last entry is for the tokens
        of padding rows.
    """

    model: nn.Module
    kv_caches: list[LayerCache]  # of the layers here
    sampler: Sampler
    last_token: Tensor
    block_size: int
    max_model_len: int
    adapters: Any = None  # see `LayerContext`

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
        """Store sampled tokens, int64 [num_rows], by slot, as inputs of the next step."""
        # The next step needs a valid id even where no token could be sampled; its row is discarded.
        self.last_token[slots] = token_ids.clamp(min=0).int()


class StepOutput(NamedTuple):
    """The part of a step that a device has launched.

    tensors: the batch on the device. hidden: [num_tokens or more, hidden_size]; the rows to take
    are `tensors.output_rows`, and a graph's next replay overwrites them. token_ids: int64
    [num_sampled], if a graph has sampled them too.
    """

    tensors: BatchTensors
    hidden: Tensor
    token_ids: Tensor | None = None


class Device(Protocol):
    """The interface of a runner's device; `CpuDevice` and `CudaDevice` implement it."""

    sampler_class: Callable[..., Sampler]

    def guard(self) -> AbstractContextManager[Any]:
        """Return a context in which work is launched on this device, whatever device is current."""

    def memory_bytes(self, parallel: ParallelContext) -> int:
        """Return the total bytes of memory that a rank has."""

    def num_kv_blocks(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        layout: KVCacheLayout,
        memory_bytes: int,
    ) -> int | None:
        """Return the number of KV blocks if it is known before the weights are loaded, else None.

        layout: of this rank's KV cache. memory_bytes: the memory that the rank has in total.
        Raises `ValueError` for settings that can be rejected before the weights are loaded.
        """

    def measure_kv_blocks(
        self,
        model_config: ModelConfig,
        layout: KVCacheLayout,
        parallel: ParallelContext,
        make_executor: Callable[[], Executor],
    ) -> int:
        """Return the number of KV blocks, measured after the weights have been loaded.

        `make_executor` makes an executor with a KV cache of a single block, to measure a step.
        """

    def prepare(self, layout: BatchLayout, computation: Computation) -> None:
        """Allocate the device buffers for batches of `layout`; graphs will record `computation`."""

    def warm_up(self, executor: Executor) -> None:
        """Compile kernels by running steps of dummy rows, and capture graphs.

        Every rank does the same, since all ranks take part in each step.
        """

    def drop_programs(self) -> None:
        """Drop graphs and the computation that they recorded: its tensors will be released."""

    def host_memory(self, num_bytes: int) -> np.ndarray:
        """Return memory, uint8, from which a batch can be copied without waiting."""

    def lock(self, memory: np.ndarray) -> None:
        """Page-lock `memory`, allocated elsewhere, in place of all batch memory before it."""

    def wait_until_read(self, batch: Batch) -> None:
        """Wait until the last copy of this batch to the device has finished."""

    def run(
        self, batch: Batch, header: BatchHeader, last_token: Tensor, forward: "Forward"
    ) -> StepOutput:
        """Copy the batch to the device, fill in pending tokens, and run the forward pass.

        Pending tokens were sampled asynchronously, so only the device knows them.
        """

    def fetch(self, token_ids: Tensor) -> Any:
        """Start to copy sampled ids [num_rows] to the host."""

    def wait(self, fetched: Any) -> list[int]:
        """Wait for these ids and for all copies to the host that were started before `fetch`."""

    def finish(self) -> None:
        """Wait for all work that was launched."""

    def release_unused(self) -> None:
        """Return memory that no tensor uses to the system."""

    def close(self) -> None:
        """Release the buffers and the graphs."""


# (tensors, header, block tables) -> hidden states [num_tokens, hidden_size]
Forward = Callable[[BatchTensors, BatchHeader, Tensor], Tensor]


class CpuDevice:
    """A CPU device. `is_compiled`: numba compiles operations of the model."""

    def __init__(
        self,
        num_threads: int | None = None,
        sampler_class: type[Sampler] = Sampler,
        is_compiled: bool = False,
    ) -> None:
        self.sampler_class: Callable[..., Sampler] = sampler_class
        self._num_threads, self._is_compiled = num_threads, is_compiled
        self._tensors: dict[Batch, BatchTensors] = {}
        self._prepared: tuple[BatchLayout, Computation] | None = None
        self._pid = os.getpid()

    def guard(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._num_threads is None else threads(self._num_threads)

    def memory_bytes(self, parallel: ParallelContext) -> int:
        return physical_memory_bytes() // parallel.num_ranks

    def num_kv_blocks(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        layout: KVCacheLayout,
        memory_bytes: int,
    ) -> int:
        memory_bytes = layout.states.rest_of(memory_bytes)
        return decide_num_kv_blocks(config, model_config, layout.block_bytes, memory_bytes)

    def measure_kv_blocks(
        self,
        model_config: ModelConfig,
        layout: KVCacheLayout,
        parallel: ParallelContext,
        make_executor: Callable[[], Executor],
    ) -> int:
        raise RuntimeError(
            "the KV cache of a CPU is sized before the weights are loaded: call num_kv_blocks()"
        )

    def prepare(self, layout: BatchLayout, computation: Computation) -> None:
        self._prepared = layout, computation

    def warm_up(self, executor: Executor) -> None:
        if self._is_compiled:
            from nanoserve.worker.compile_ahead import compile_ahead

            layout, computation = self._prepared
            batch = Batch(layout, self.host_memory(layout.num_bytes))
            parts = computation.block_size, computation.model, computation.sampler
            compile_ahead(executor, batch, *parts)
            self._tensors.pop(batch, None)

    def drop_programs(self) -> None:
        self._prepared = None

    def host_memory(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, dtype=np.uint8)

    def lock(self, memory: np.ndarray) -> None:
        self._tensors.clear()

    def wait_until_read(self, batch: Batch) -> None:
        """Raise `RuntimeError` in a forked process, where no step would end.

        A fork has none of its parent's threads, so waiting for OpenMP's threads would take for
        ever.
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
        """Do nothing: on a CPU, launched work has finished when the call returns."""

    def release_unused(self) -> None:
        """Do nothing: torch has already returned the memory to the system."""

    def close(self) -> None:
        self._tensors.clear()
        self._prepared = None
