"""The GPU device: one copy in, CUDA graphs, one copy out. It also measures the KV cache's memory.

A step's integers are packed into page-locked memory and copied to one fixed buffer on the device.
Decode steps replay a captured graph that reads this buffer; LM head and sampling follow it, and are
launched while the graph is still running. Only the sampled ids are copied back, and
log-probabilities where a request wants them.

All work is launched on one stream, so steps execute in order without the host waiting for any: a
step reads what earlier steps have written, and finishes its writes before later ones start.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.executor import Executor, SecondModelMemory
from nanoserve.models.layers.context import ParallelContext
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling.sampler import Sampler
from nanoserve.worker.adapted_graphs import AdaptedGraphs
from nanoserve.worker.backend_checks import check_graphs
from nanoserve.worker.compile_kernels import compile_kernels
from nanoserve.worker.cpu_device import Computation, Forward, StepOutput
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_graphs import graph_sizes
from nanoserve.worker.draft_program import DraftProgram
from nanoserve.worker.gpu_memory import (
    GPUMemory,
    measure_graphs,
    measure_mixed_graphs,
    measure_step,
    run_worst_case,
)
from nanoserve.worker.graph_programs import DecodeProgram, GraphProgram, RowsProgram
from nanoserve.worker.kv_cache import KVCacheLayout, decide_num_kv_blocks, longest_sequence
from nanoserve.worker.mixed_program import MixedProgram, mixed_sizes
from nanoserve.worker.sampling_program import SamplingProgram

_MOST_POSITIONS = 2**24  # float32 does not represent every larger integer


class Fetched(NamedTuple):
    """Ids that are copied to page-locked memory, and the event after the copy."""

    token_ids: torch.Tensor
    done: Any


class CudaDevice:
    """One NVIDIA GPU.

    is_capturable, captures_mixed_steps: whether the attention backend can be part of a graph of
    decode steps, and of a graph of mixed steps.

    second_models: functions that return the memory that second models will take on this GPU. Raises
    `ValueError` for graphs that are configured and cannot be captured.
    """

    def __init__(
        self,
        config: EngineConfig,
        cuda: Cuda,
        is_capturable: bool,
        captures_mixed_steps: bool = False,
        second_models: Sequence[Callable[[], SecondModelMemory]] = (),
    ) -> None:
        check_graphs(config, is_capturable, captures_mixed_steps)
        self.config, self.cuda, self._second_models = config, cuda, second_models
        is_dependent = KernelConfig.of(config.kernel_config).dependent_launch
        self.sampler_class: Callable[..., Sampler] = partial(
            FusedSampler, is_dependent=is_dependent
        )
        # Sending and receiving between pipeline stages has not been part of a graph yet.
        is_whole = config.pipeline_parallel_size == 1
        has_graphs = is_capturable and is_whole and not config.enforce_eager
        self.graph_sizes = graph_sizes(config.max_num_seqs) if has_graphs else []
        has_mixed = config.capture_mixed_steps
        if has_mixed is None:
            has_mixed = captures_mixed_steps and _captures_mixed_steps_by_default(config)
        is_mixed = has_mixed and has_graphs
        self.mixed_sizes = mixed_sizes(config.max_num_batched_tokens) if is_mixed else []
        self.programs: list[GraphProgram] = []  # a step is replayed by the first one that covers it
        self.buffers: CudaBuffers | None = None
        self._computation: Computation | None = None
        self._adapted: AdaptedGraphs | None = None
        self._allocated_before = cuda.allocated()

    def guard(self) -> AbstractContextManager[Any]:
        return self.cuda.guard()

    # ------------------------------------------------------------------ a step

    def run(
        self, batch: Batch, header: BatchHeader, last_token: torch.Tensor, forward: Forward
    ) -> StepOutput:
        if self._adapted is not None:
            output = self._adapted.replay(batch, header, forward)
            if output is not None:
                return output
        # Graphs have recorded this computation, and replay no other.
        is_recorded = self._computation is not None and forward == self._computation.forward
        for program in self.programs if is_recorded else ():
            if program.covers(batch, header):
                return program.replay(batch, header)
        tables, tensors = self.buffers.copy_in(batch, header), self.buffers.tensors
        if header.num_pending:
            tensors.fill_in_pending(header, last_token)
        return StepOutput(tensors, forward(tensors, header, tables))

    def fetch(self, token_ids: torch.Tensor) -> Fetched:
        host = self.cuda.pinned(len(token_ids), dtype=token_ids.dtype)
        host.copy_(token_ids, non_blocking=True)
        done = self.cuda.event()
        done.record()
        return Fetched(host, done)

    def wait(self, fetched: Fetched) -> list[int]:
        fetched.done.synchronize()
        return fetched.token_ids.tolist()

    def wait_until_read(self, batch: Batch) -> None:
        self.buffers.wait_until_read(batch)

    # ------------------------------------------------------------------ buffers

    def host_memory(self, num_bytes: int) -> np.ndarray:
        return self.cuda.pinned(num_bytes, dtype=torch.uint8).numpy()

    def lock(self, memory: np.ndarray) -> None:
        with self.guard():  # otherwise a CUDA context of half a GiB is created on the current GPU
            self.cuda.page_lock(memory)

    def prepare(self, layout: BatchLayout, computation: Computation) -> None:
        if self.buffers is None or self.buffers.layout != layout:
            self.buffers = CudaBuffers(self.cuda, layout)
        self._computation = computation
        self._adapted = AdaptedGraphs.of(self.buffers, computation)

    def drop_programs(self) -> None:
        self.programs, self._computation, self._adapted = [], None, None

    def finish(self) -> None:
        self.cuda.synchronize()

    def release_unused(self) -> None:
        self.cuda.release_unused()

    def close(self) -> None:
        self.drop_programs()
        self.buffers = None
        with self.guard():
            self.cuda.close()
            self.cuda.release_unused()

    # ------------------------------------------------------------------ starting

    def memory_bytes(self, parallel: ParallelContext) -> int:
        return self.cuda.memory_info()[1]

    def num_kv_blocks(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        layout: KVCacheLayout,
        memory_bytes: int,
    ) -> None:
        """Return None: the size of the pool is known only after the weights have been loaded.

        Raises `ValueError` for a `max_model_len` that no pool can hold, or that must be given and
        is not.
        """
        if config.max_model_len is not None:
            most = config.num_kv_blocks or (2**31 - 1) // config.block_size - 1
            longest_sequence(config, model_config, most)
        elif model_config.max_position_embeddings > _MOST_POSITIONS:
            raise ValueError(
                f"the model allows {model_config.max_position_embeddings} positions: set "
                f"max_model_len, because position tables are made before the KV pool is measured"
            )

    def measure_kv_blocks(
        self,
        model_config: ModelConfig,
        layout: KVCacheLayout,
        parallel: ParallelContext,
        make_executor: Callable[[], Executor],
    ) -> int:
        """Return the configured number of KV blocks, or the number that fits in the memory left."""
        if self._has_explicit_pool:
            self.cuda.release_unused()
            free = layout.states.rest_of(self.cuda.memory_info()[0])
            return decide_num_kv_blocks(self.config, model_config, layout.block_bytes, free)
        executor = make_executor()
        run_step = partial(self._run_worst_case, executor)
        group = parallel.tp.group
        nccl_bytes = 0 if group is None else group.device_bytes
        step = measure_step(self.cuda, self._allocated_before, nccl_bytes, run_step)
        with torch.inference_mode():
            graphs, other_graphs = self._measure_graphs(self._computation)
            if self._adapted is not None:
                other_graphs += sum(self._adapted.record(self._measure_graphs))
        # Only the weights of the executor are kept.
        self.drop_programs()
        del executor, run_step
        self.cuda.release_unused()
        free, total = self.cuda.memory_info()
        others = [memory() for memory in self._second_models]
        second = SecondModelMemory(
            sum(memory.weights for memory in others), sum(memory.block_bytes for memory in others)
        )
        memory = GPUMemory(
            total,
            free,
            step.weights - layout.states.num_bytes,  # the executor had them, too
            step.activations,
            graphs,
            other_graphs,
            step.libraries,
            second,
            layout.states.num_bytes,
        )
        return memory.num_kv_blocks(self.config, model_config, layout.block_bytes)

    def warm_up(self, executor: Executor) -> None:
        if self._has_explicit_pool:
            self._run_worst_case(executor)  # memory shortage raises here, not while serving
        self._compile(executor)
        with torch.inference_mode():
            self.programs = self._capture_all(self._computation)
            if self._adapted is not None:
                self._adapted.capture(self._capture_all)

    @property
    def _has_explicit_pool(self) -> bool:
        config = self.config
        return config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None

    def _run_worst_case(self, executor: Executor) -> None:
        run_worst_case(executor, self.buffers.new_batch(), self.config)

    def _compile(self, executor: Executor) -> None:
        compile_kernels(executor, self.buffers, self.config)

    def _measure_graphs(self, computation: Computation) -> tuple[int, int]:
        """Return the bytes that graphs of a computation take: of few tokens a row, and of mixed."""
        graphs = mixed_graphs = 0
        if self.graph_sizes:
            capture = partial(self._capture, computation)
            graphs = measure_graphs(self.cuda, self.graph_sizes, capture)
        if self.mixed_sizes:
            capture = partial(self._capture_mixed, computation)
            mixed_graphs = measure_mixed_graphs(self.cuda, self.mixed_sizes, capture)
        return graphs, mixed_graphs

    def _capture_all(self, computation: Computation) -> list[GraphProgram]:
        """Capture and return the programs that record a computation, in order of preference."""
        programs = self._capture(computation, self.graph_sizes, shows_progress=True)
        return programs + self._capture_mixed(computation, self.mixed_sizes, shows_progress=True)

    def _capture(
        self, computation: Computation, sizes: list[int], shows_progress: bool = False
    ) -> list[GraphProgram]:
        """Capture and return the programs of steps with up to `sizes` rows; [] without sizes."""
        if not sizes:
            return []
        programs = make_programs(self.config, self.cuda, self.buffers, computation, sizes)
        for program in reversed(programs):  # some use outputs of the graphs after them
            program.capture(shows_progress=shows_progress)
        return programs

    def _capture_mixed(
        self, computation: Computation, sizes: list[int], shows_progress: bool = False
    ) -> list[GraphProgram]:
        """Capture and return the program of mixed steps of `sizes` tokens; [] without sizes."""
        if not sizes:
            return []
        program = MixedProgram(self.cuda, self.buffers, computation, sizes)
        program.capture(shows_progress=shows_progress)
        return [program]


def _captures_mixed_steps_by_default(config: EngineConfig) -> bool:
    """Return True if mixed steps are captured when `capture_mixed_steps` is not set.

    This holds for configurations in which it has run on a GPU. All ranks reach the same decision.
    """
    has_one_rank = config.tensor_parallel_size == 1
    return has_one_rank and config.speculative_config is None and config.quantization is None


def make_programs(
    config: EngineConfig,
    cuda: Cuda,
    buffers: CudaBuffers,
    computation: Computation,
    sizes: list[int],
) -> list[GraphProgram]:
    """Return the graph programs of `config` for up to `sizes` rows, in order of preference.

    They must be captured from the last to the first, since some use the outputs of later ones.
    """
    parts = cuda, buffers, computation
    # If sampling is in a graph too, filling in pending tokens would be the only launch left.
    fills_in_pending = config.capture_sampling and config.async_scheduling
    rows: list[RowsProgram] = [DecodeProgram(*parts, sizes, bool(fills_in_pending))]
    drafts = config.speculative_config
    if drafts is not None and not drafts.enforce_eager:
        rows.append(DraftProgram(*parts, sizes, drafts.num_speculative_tokens + 1))
    if not config.capture_sampling:
        return [*rows]
    keeps = bool(config.async_scheduling)
    sampling = [SamplingProgram(*parts, program, keeps) for program in rows]
    return [*sampling, *rows]
