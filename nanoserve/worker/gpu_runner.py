"""What a GPU does otherwise than `ModelRunner`: one copy in, graphs, one copy out; its memory.

A step's integers are packed into page-locked memory and copied to one fixed buffer on the device.
Decode steps replay a captured graph that reads this buffer; LM head and sampling follow it, and
are launched while the graph still runs. The sampled ids are the only thing copied back.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import HEADER, Batch, BatchLayout
from nanoserve.engine.executor import StepResult
from nanoserve.layers.context import LayerContext
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling_params import SamplingParams, SlotParams
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_graphs import DecodeGraphs, append_dummy_rows, graph_sizes
from nanoserve.worker.kv_cache import GPUMemory, allocate_kv_cache, decide_num_kv_blocks
from nanoserve.worker.model_runner import BatchTensors, ModelRunner, Step


class GPURunner(ModelRunner):
    """The runner of one NVIDIA GPU."""

    sampler_class = FusedSampler

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        context: LayerContext,
        cuda: Cuda | None = None,
    ) -> None:
        self.config, self.model_config, self.context = config, model_config, context
        self.cuda = cuda or Cuda(context.device)
        self.graphs: DecodeGraphs | None = None
        if context.attention.capturable and not config.enforce_eager:
            self.graphs = DecodeGraphs(graph_sizes(config.max_num_seqs))
        self._done = self.cuda.event()
        if config.max_model_len is not None:  # to be refused before the weights are read
            most = config.num_kv_blocks or (2**31 - 1) // config.block_size - 1
            config.resolve_max_model_len(model_config.max_position_embeddings, most)
        with self.cuda.guard():
            allocated_before = self.cuda.allocated()
            self._load(path)
            self._make_room(self._decide_num_kv_blocks(allocated_before))
            self._allocate()
            if self._has_explicit_pool:
                self._run_worst_case()  # or this raises now, and not in the middle of serving
            self._compile()
            self._capture()

    def submit(self, batch: Batch, sampling: list[SlotParams]) -> Step:
        with self.cuda.guard():
            step = super().submit(batch, sampling)
            token_ids = self._token_ids[: len(step.token_ids)]
            token_ids.copy_(step.token_ids, non_blocking=True)
            self._done.record()
        return step._replace(token_ids=token_ids)

    def collect(self, handle: Step) -> StepResult:
        self._done.synchronize()
        return super().collect(handle)

    def close(self) -> None:
        super().close()
        self.graphs = self.device_batch = self._device_memory = None
        self.cuda.unlock()
        self.cuda.release_unused()

    def _make_room(self, num_kv_blocks: int) -> None:
        super()._make_room(num_kv_blocks)
        layout = self.batches[0].layout
        device = self.context.device
        self._device_memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self.device_batch = BatchTensors(layout, self._device_memory)
        self.sampler.tensors = self.device_batch
        self._token_ids = self.cuda.pinned(self.config.max_num_seqs, dtype=torch.int64)

    def use_memory(self, memory: np.ndarray, layout: BatchLayout | None = None) -> None:
        self.cuda.page_lock(memory)
        super().use_memory(memory, layout)

    def _host_memory(self, num_bytes: int) -> np.ndarray:
        return self.cuda.pinned(num_bytes, dtype=torch.uint8).numpy()

    def run_model(self, batch: Batch, header: dict[str, int]) -> tuple[BatchTensors, torch.Tensor]:
        if self.graphs is None or not self.graphs.covers(header):
            self._copy_in(batch, header["num_rows"])
            return self.device_batch, self._forward(self.device_batch, header)
        size = self.graphs.size_for(header["num_rows"])
        missing = np.ones(size - header["num_rows"], dtype=np.int32)
        append_dummy_rows(batch, header, missing, self.config.block_size)
        self._copy_in(batch, size)
        return self.device_batch, self.graphs.replay(size)

    def _copy_in(self, batch: Batch, num_rows: int) -> None:
        used = batch.num_bytes_used(num_rows)
        host = torch.from_numpy(batch.memory)[:used]
        self._device_memory[:used].copy_(host, non_blocking=True)

    @torch.inference_mode()
    def _compile(self) -> None:
        """Run the kernels' variants that the worst case has not run, none of them while serving."""
        most = self.config.max_num_seqs
        self._copy_in_dummies(np.ones(most, dtype=np.int32))
        for num_rows, max_context_len in ((1, self.max_model_len), (1, 1), (most, 1)):
            self._decode(num_rows, max_context_len)

    @torch.inference_mode()
    def _capture(self, shows_progress: bool = True) -> None:
        shows_progress = shows_progress and self.context.tp.rank == 0
        if self.graphs is None:
            return
        self._copy_in_dummies(np.ones(self.graphs.sizes[-1], dtype=np.int32))
        forward = partial(self._decode, max_context_len=self.max_model_len)
        self.graphs.capture(self.cuda, forward, shows_progress=shows_progress)

    def _decode(self, num_rows: int, max_context_len: int) -> torch.Tensor:
        """What a graph records: `num_rows` of one token, of contexts up to the longest."""
        header = dict.fromkeys(HEADER, 0) | {
            "num_rows": num_rows,
            "num_tokens": num_rows,
            "num_decode_rows": num_rows,
            "max_query_len": 1,
            "max_context_len": max_context_len,
        }
        return self._forward(self.device_batch, header)

    def _copy_in_dummies(self, num_new_tokens: np.ndarray) -> dict[str, int]:
        header = append_dummy_rows(
            self.batches[0], dict.fromkeys(HEADER, 0), num_new_tokens, self.config.block_size
        )
        self._copy_in(self.batches[0], header["num_rows"])
        return header

    @property
    def _has_explicit_pool(self) -> bool:
        config = self.config
        return config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None

    def _decide_num_kv_blocks(self, allocated_before: int) -> int:
        """What the configuration fixes, or what is left when everything else has its memory."""
        config, model_config = self.config, self.model_config
        if self._has_explicit_pool:
            self.cuda.release_unused()
            free, _ = self.cuda.memory_info()
            return decide_num_kv_blocks(config, model_config, self.context.tp, free)
        # A pool of one block will do: all rows of the profile are dummies. The buffers are those
        # of the longest sequence that may turn out to fit.
        max_len = config.max_model_len or model_config.max_position_embeddings
        self._make_room(-(-max_len // config.block_size))
        self.kv_cache = allocate_kv_cache(model_config, 1, config.block_size, self.context)
        weights = self.cuda.allocated() - allocated_before
        self.cuda.reset_peak()
        self._run_worst_case()
        activations = self.cuda.peak_allocated() - allocated_before - weights
        graphs = self._measure_graphs()
        self.kv_cache = None
        self.cuda.release_unused()
        free, total = self.cuda.memory_info()
        memory = GPUMemory(total, free, weights, activations, graphs)
        return memory.num_kv_blocks(config, model_config, self.context.tp)

    @torch.inference_mode()
    def _run_worst_case(self) -> None:
        """A step of `max_num_batched_tokens`, and `max_num_seqs` rows of logits and sampler."""
        rows, budget = self.config.max_num_seqs, self.config.max_num_batched_tokens
        tokens = min(budget, rows * self.max_model_len)
        num_new_tokens = np.full(rows, tokens // rows, dtype=np.int32)
        num_new_tokens[: tokens % rows] += 1
        header = self._copy_in_dummies(num_new_tokens[::-1])
        hidden = self._forward(self.device_batch, header)
        logits = self.model.compute_logits(hidden[:rows])
        vocab_size, most_logprobs = self.model_config.vocab_size, self.config.max_logprobs
        if logits is None:  # another rank samples
            return
        sampler = FusedSampler(rows, vocab_size, self.context.device)
        sampler.tensors = self.device_batch
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
                sampler.set_slot(SlotParams(slot, params, seed=slot))
            sampler.sample(logits, slots, slots)

    def _measure_graphs(self) -> int:
        """Bytes that the graphs take, by capturing them; they are dropped again."""
        if self.graphs is None:
            return 0
        self.cuda.release_unused()
        free_before, _ = self.cuda.memory_info()
        self._capture(shows_progress=False)
        free, _ = self.cuda.memory_info()
        self.graphs = DecodeGraphs(self.graphs.sizes)
        self.cuda.release_unused()
        return max(0, free_before - free)
