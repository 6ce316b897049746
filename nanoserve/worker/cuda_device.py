"""What a GPU does: one copy in, graphs, one copy out; and how much of its memory is left for KV.

A step's integers are packed into page-locked memory and copied to one fixed buffer on the device.
Decode steps replay a captured graph that reads this buffer; LM head and sampling follow it, and
are launched while the graph still runs. The sampled ids are the only thing copied back.

Everything is launched on one stream, so steps follow each other there without being waited for:
what a step reads late was written by those before it, and what it writes late is written before
anything of those behind it.
"""

import logging
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.engine.executor import SlotUpdate
from nanoserve.layers.context import ParallelContext
from nanoserve.layers.tensor_parallel import TensorParallel
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_graphs import DecodeGraphs, append_dummy_rows, graph_sizes
from nanoserve.worker.gpu_memory import GPUMemory
from nanoserve.worker.host_device import Forward, HostDevice
from nanoserve.worker.kv_cache import allocate_kv_caches, decide_num_kv_blocks
from nanoserve.worker.model_runner import ModelRunner
from nanoserve.worker.startup import make_room

logger = logging.getLogger(__name__)

_MOST_OF_LIBRARIES = 2**30  # bytes; kernels and cuBLAS load a few hundred MiB
_MOST_POSITIONS = 2**24  # of those above, float32 does not tell neighbours apart


class Fetched(NamedTuple):
    """Ids on their way into page-locked memory, and the event behind them."""

    token_ids: torch.Tensor
    done: Any


class CudaDevice(HostDevice):
    """One NVIDIA GPU. `is_capturable` is whether the attention backend can be part of a graph."""

    sampler_class, graphs_class = FusedSampler, DecodeGraphs

    def __init__(self, config: EngineConfig, cuda: Cuda, is_capturable: bool) -> None:
        self.config, self.cuda = config, cuda
        self.graphs: DecodeGraphs | None = None
        if is_capturable and not config.enforce_eager:
            self.graphs = self.graphs_class(graph_sizes(config.max_num_seqs))
        self._copied: dict[int, Any] = {}  # by address of a batch: the event behind its last copy
        self._allocated_before = cuda.allocated()

    def guard(self) -> AbstractContextManager[Any]:
        return self.cuda.guard()

    # ------------------------------------------------------------------ a step

    def run(
        self, batch: Batch, header: BatchHeader, last_token: torch.Tensor, forward: Forward
    ) -> tuple[BatchTensors, torch.Tensor]:
        covered = self.graphs is not None and self.graphs.covers(header)
        if covered:
            size = self.graphs.size_for(header.num_rows)
            missing = np.ones(size - header.num_rows, dtype=np.int32)
            header = append_dummy_rows(batch, header, missing, self.config.block_size)
        tables = self._copy_in(batch, header)
        if header.num_pending:
            self.tensors.fill_in_pending(header, last_token)
        if covered:
            return self.tensors, self.graphs.replay(size)
        return self.tensors, forward(self.tensors, header, tables)

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
        copied = self._copied.get(batch.memory.ctypes.data)
        if copied is not None:
            copied.synchronize()

    def _copy_in(self, batch: Batch, header: BatchHeader) -> torch.Tensor:
        """Returns the step's block tables, in rows of full width: graphs know one stride only."""
        used = batch.num_bytes_used(header)
        host = torch.from_numpy(batch.memory)[:used]
        self._memory[:used].copy_(host, non_blocking=True)
        address = batch.memory.ctypes.data
        if address not in self._copied:
            self._copied[address] = self.cuda.event()
        self._copied[address].record()
        packed = self.tensors.packed_tables(header)
        self._tables[: header.num_rows, : header.table_width].copy_(packed)
        return self._tables[: header.num_rows]

    # ------------------------------------------------------------------ buffers

    def make_room(self, layout: BatchLayout) -> None:
        device = self.cuda.device
        self._memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.tensors = BatchTensors(layout, self._memory)
        shape = (layout.max_num_rows, layout.max_blocks_per_row)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)

    def host_memory(self, num_bytes: int) -> np.ndarray:
        return self.cuda.pinned(num_bytes, dtype=torch.uint8).numpy()

    def lock(self, memory: np.ndarray) -> None:
        with self.guard():  # or the caller's current GPU gets a CUDA context of half a GiB
            self.cuda.page_lock(memory)

    def drop_recorded(self) -> None:
        if self.graphs is not None:
            self.graphs = self.graphs_class(self.graphs.sizes)

    def finish(self) -> None:
        self.cuda.synchronize()

    def close(self) -> None:
        self.graphs = self.tensors = self._memory = self._tables = None
        self._copied.clear()
        with self.guard():
            self.cuda.close()
            self.cuda.release_unused()

    # ------------------------------------------------------------------ starting

    def memory_bytes(self, parallel: ParallelContext) -> int:
        return self.cuda.memory_info()[1]

    def pool_before_loading(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        parallel: ParallelContext,
        block_bytes: int,
    ) -> None:
        if config.max_model_len is not None:  # to be refused before the weights are read
            most = config.num_kv_blocks or (2**31 - 1) // config.block_size - 1
            config.resolve_max_model_len(model_config.max_position_embeddings, most)
        elif model_config.max_position_embeddings > _MOST_POSITIONS:
            raise ValueError(
                f"the model allows {model_config.max_position_embeddings} positions: give "
                f"max_model_len, because their tables are made before the KV pool is known"
            )

    def pool_after_loading(self, runner: ModelRunner) -> int:
        """What the configuration fixes, or what is left when everything else has its memory."""
        config, model_config, layout = self.config, runner.model_config, runner.kv_cache_layout
        if self._has_explicit_pool:
            self.cuda.release_unused()
            free, _ = self.cuda.memory_info()
            return decide_num_kv_blocks(config, model_config, layout.block_bytes, free)
        # A pool of one block will do: all rows of the profile are dummies. The buffers are those
        # of the longest sequence that may turn out to fit.
        max_len = config.max_model_len or model_config.max_position_embeddings
        make_room(runner, blocks_needed(max_len, config.block_size))
        runner.kv_caches = allocate_kv_caches(*layout, 1, runner.context.device)
        weights = self.cuda.allocated() - self._allocated_before
        others = self.cuda.held_by_others()
        self.cuda.reset_peak()
        self._run_worst_case(runner)
        activations = self.cuda.peak_allocated() - self._allocated_before - weights
        libraries = self._libraries(runner.context.tp, self.cuda.held_by_others() - others)
        graphs = self._measure_graphs(runner)
        runner.kv_caches = None
        self.cuda.release_unused()
        free, total = self.cuda.memory_info()
        memory = GPUMemory(total, free, weights, activations, graphs, libraries)
        return memory.num_kv_blocks(config, model_config, layout.block_bytes)

    def warm_up(self, runner: ModelRunner) -> None:
        if self._has_explicit_pool:
            self._run_worst_case(runner)  # or this raises now, and not in the middle of serving
        self._compile(runner)
        if self.graphs is not None:
            shows_progress = runner.context.tp.rank == 0
            self._capture(runner, self.graphs, shows_progress)

    @property
    def _has_explicit_pool(self) -> bool:
        config = self.config
        return config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None

    @torch.inference_mode()
    def _compile(self, runner: ModelRunner) -> None:
        """Run the kernels' variants that the worst case has not run, none of them while serving."""
        most = self.config.max_num_seqs
        self._copy_in_dummies(runner, np.ones(most, dtype=np.int32))
        for num_rows in (1, most):
            self._decode(runner, num_rows, runner.max_model_len)

    @torch.inference_mode()
    def _capture(self, runner: ModelRunner, graphs: DecodeGraphs, shows_progress: bool) -> None:
        self._copy_in_dummies(runner, np.ones(graphs.sizes[-1], dtype=np.int32))
        forward = partial(self._decode, runner, max_context_len=runner.max_model_len)
        graphs.capture(self.cuda, forward, shows_progress=shows_progress)

    def _libraries(self, tp: TensorParallel, grown: int) -> int:
        """Bytes that code and buffers of kernels, cuBLAS and NCCL take beside torch's memory.

        `grown`: by how much all that is not torch's has, on the whole GPU, while the first step
        ran. The CUDA context, a third to half of a GiB, is not in it: CUDA cannot be asked before
        there is one, and afterwards it looks like another process's memory.
        """
        if grown > _MOST_OF_LIBRARIES:
            logger.warning(
                f"{grown} bytes of the GPU were taken while a first step ran, most of them by "
                f"another process: {_MOST_OF_LIBRARIES} are counted as this engine's"
            )
        nccl = 0 if tp.group is None else tp.group.device_bytes
        return nccl + min(max(0, grown), _MOST_OF_LIBRARIES)

    def _measure_graphs(self, runner: ModelRunner) -> int:
        """Bytes that the graphs will take: the largest sets aside what the others then share.

        What each of the others adds, the second largest shows. And with the first that there is, a
        library sets aside for good what it needs on the stream that graphs are recorded on.
        """
        if self.graphs is None:
            return 0
        sizes = self.graphs.sizes
        _, for_good = self._measure_capture(runner, sizes[:1])
        largest, _ = self._measure_capture(runner, sizes[-1:])
        both, _ = self._measure_capture(runner, sizes[-2:])
        return for_good + largest + max(0, both - largest) * (len(sizes) - 1)

    def _measure_capture(self, runner: ModelRunner, sizes: list[int]) -> tuple[int, int]:
        """Bytes that graphs of `sizes` take while they are there, and when they are gone."""
        self.cuda.release_unused()
        before, _ = self.cuda.memory_info()
        graphs = self.graphs_class(sizes)
        self._capture(runner, graphs, shows_progress=False)
        with_them, _ = self.cuda.memory_info()
        del graphs
        self.cuda.release_unused()
        after, _ = self.cuda.memory_info()
        return max(0, before - with_them), max(0, before - after)

    def _decode(self, runner: ModelRunner, num_rows: int, max_context_len: int) -> torch.Tensor:
        """What a graph records: `num_rows` of one token, of contexts up to the longest."""
        header = BatchHeader(
            num_tokens=num_rows,
            num_rows=num_rows,
            num_decode_rows=num_rows,
            max_query_len=1,
            max_context_len=max_context_len,
        )
        return runner.run_model(self.tensors, header, self._tables[:num_rows])

    def _copy_in_dummies(
        self, runner: ModelRunner, num_new_tokens: np.ndarray
    ) -> tuple[BatchHeader, torch.Tensor]:
        batch, block_size = runner.batches[0], self.config.block_size
        longest = int(num_new_tokens.max())
        empty = BatchHeader(table_width=blocks_needed(longest, block_size))
        header = append_dummy_rows(batch, empty, num_new_tokens, block_size)
        return header, self._copy_in(batch, header)

    @torch.inference_mode()
    def _run_worst_case(self, runner: ModelRunner) -> None:
        """A step of `max_num_batched_tokens`, and `max_num_seqs` rows of logits and sampler."""
        rows, budget = self.config.max_num_seqs, self.config.max_num_batched_tokens
        tokens = min(budget, rows * runner.max_model_len)
        used = rows
        if tokens == rows > 1 and runner.max_model_len > 1:
            used -= 1  # for a row of two: attention over chunks must not be compiled while serving
        num_new_tokens = np.full(used, tokens // used, dtype=np.int32)
        num_new_tokens[: tokens % used] += 1
        header, tables = self._copy_in_dummies(runner, num_new_tokens[::-1])
        hidden = runner.run_model(self.tensors, header, tables)
        logits = runner.model.compute_logits(hidden[:rows])
        if logits is None:  # another rank samples
            return
        vocab_size, most_logprobs = runner.model_config.vocab_size, self.config.max_logprobs
        most_logprobs = vocab_size if most_logprobs == -1 else most_logprobs
        sampler = FusedSampler(rows, vocab_size, self.cuda.device)
        slots = np.arange(rows)
        # The last is the most that a request can ask for; the others compile their kernels.
        for params in (
            SamplingParams(),
            SamplingParams(top_p=0.9),
            SamplingParams(
                top_k=vocab_size - 1, top_p=0.9, repetition_penalty=1.1, logprobs=most_logprobs
            ),
        ):
            for slot in slots.tolist():
                sampler.set_slot(SlotUpdate(slot, params, seed=slot))
            sampler.sample(logits, slots, slots, self.tensors)
