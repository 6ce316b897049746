"""Measures the GPU memory that is left for KV blocks, in steps of dummy rows."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.executor import Executor, ForwardInputs, SecondModelMemory, SlotUpdate
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.adapters import dummy_adapters
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.dummy_rows import pack_dummy_step
from nanoserve.worker.kv_cache import blocks_wanted

logger = logging.getLogger(__name__)

_GIB = 2**30
_MOST_OF_LIBRARIES = 2**30  # bytes; kernels and cuBLAS load a few hundred MiB
_PLENTY = 2**20  # KV blocks; the block manager takes half a second to initialize so many


@dataclass(frozen=True)
class GPUMemory:
    """The bytes of a GPU's memory, measured with the weights loaded and after a worst-case step."""

    total: int
    free: int  # with only the weights loaded; other processes may hold some of the rest
    weights: int
    activations: int  # additional peak memory of a worst-case step
    graphs: int  # of steps of few tokens for each row
    mixed_graphs: int = 0  # of mixed steps, and of all steps with adapters
    libraries: int = 0  # CUDA libraries, outside torch's memory; `free` does not include them
    second_model: SecondModelMemory = field(default_factory=SecondModelMemory)
    states: int = 0  # recurrent states of all slots

    def num_kv_blocks(
        self, config: EngineConfig, model_config: ModelConfig, block_bytes: int
    ) -> int:
        """Return the number of usable blocks in this engine's share, `gpu_memory_utilization`.

        Other processes do not reduce the share. Raises `ValueError`, with the numbers and the
        options to change, if no block fits, or if the share is not free because others hold the
        memory.
        """
        share = int(self.total * config.gpu_memory_utilization)
        graphs = self.graphs + self.mixed_graphs
        still_wanted = self.activations + graphs + self._of_second_model + self.states
        taken = self.weights + still_wanted + self.libraries
        numbers = self._numbers(config, share)
        block_bytes += self.second_model.block_bytes
        if share - taken < 2 * block_bytes:
            raise ValueError(
                f"no memory is left for KV blocks: {numbers}. Raise gpu_memory_utilization, or "
                f"lower max_num_batched_tokens or max_num_seqs"
            )
        # More blocks than all running sequences need at full length only help the prefix cache.
        wanted = max(blocks_wanted(config, model_config), _PLENTY)
        most = min(wanted, (2**31 - 1) // config.block_size - 1)  # KV slots are numbered in 32 bits
        num_blocks = min((share - taken) // block_bytes - 1, most)
        missing = (num_blocks + 1) * block_bytes + still_wanted - self.free
        if missing > 0:
            raise ValueError(
                f"not enough free GPU memory: {num_blocks} KV blocks need {_gib(missing)} more "
                f"than the {_gib(self.free)} that are free. Other processes, other engines in this "
                f"process or CUDA itself use the rest; lower gpu_memory_utilization ({numbers})"
            )
        return num_blocks

    @property
    def _of_second_model(self) -> int:
        """Bytes of the second model without its KV cache.

        It is the smaller model, so its graphs take at most as much memory as the first model's. It
        has none of mixed steps, and none at all if it has no KV cache. Its steps run between the
        first model's, and reuse the same activation memory.
        """
        return self.second_model.weights + (self.graphs if self.second_model.block_bytes else 0)

    def _numbers(self, config: EngineConfig, share: int) -> str:
        drafts, second = config.speculative_config, ""
        rows = f"max_num_seqs={config.max_num_seqs}"
        if drafts is not None:
            rows += f" with {drafts.num_speculative_tokens} draft tokens each"
        if self._of_second_model:
            second = f", a draft model's weights and graphs {_gib(self._of_second_model)}"
        if self.states:
            second += f", recurrent states {_gib(self.states)}"
        return (
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {_gib(self.total)} is "
            f"{_gib(share)}; weights take {_gib(self.weights)}, a step of "
            f"max_num_batched_tokens={config.max_num_batched_tokens} and "
            f"{rows} {_gib(self.activations)}, CUDA graphs "
            f"{_gib(self.graphs + self.mixed_graphs)}, CUDA's libraries "
            f"{_gib(self.libraries)}{second}"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"


def most_outputs(config: EngineConfig) -> int:
    """Return the largest number of rows of logits of a step: one for each token that is sampled."""
    if config.runner == "pooling":
        return 0
    drafts = config.speculative_config
    of_row = 1 if drafts is None else drafts.num_speculative_tokens + 1
    return min(config.max_num_seqs * of_row, config.max_num_batched_tokens)


@torch.inference_mode()
def run_worst_case(executor: Executor, batch: Batch, config: EngineConfig) -> None:
    """Run a step of `max_num_batched_tokens`, with as many rows of logits as a step may have.

    That is one row for each sequence, and one for each of its draft tokens. The sampler has none of
    the user's logits processors, since these may keep state. With `adapter_kernels`, all rows have
    an adapter.
    """
    rows, longest = config.max_num_seqs, executor.max_model_len
    tokens = min(config.max_num_batched_tokens, rows * longest)
    outputs, used = min(tokens, most_outputs(config)), rows
    if tokens == rows > 1 and longest > 1:
        used -= 1  # so that one row has two tokens: attention over chunks must be compiled too
    num_new_tokens = np.full(used, tokens // used, dtype=np.int32)
    num_new_tokens[: tokens % used] += 1
    pack_dummy_step(batch, num_new_tokens[::-1], config.block_size, num_sampled=outputs)
    handle = executor.forward(batch, ForwardInputs(adapters=dummy_adapters(config, used)))
    logits = handle.logits
    if logits is None:  # another rank samples
        return
    vocab_size, most_logprobs = logits.shape[1], config.max_logprobs
    most_logprobs = vocab_size if most_logprobs == -1 else most_logprobs
    mode = config.logprobs_mode
    sampler = FusedSampler(rows, vocab_size, logits.device, logprobs_mode=mode)
    slots = batch.output_slots[:outputs].copy()
    # The most expensive request: float32 logits, filtered, with log-probabilities.
    params = SamplingParams(
        top_k=vocab_size - 1, top_p=0.9, repetition_penalty=1.1, logprobs=most_logprobs
    )
    for slot in range(rows):
        sampler.set_slot(SlotUpdate(slot, params, seed=slot))
    sampler.sample(logits, slots, slots, handle.tensors)


class StepMemory(NamedTuple):
    """Bytes of the weights, and what a step adds to them, in torch's memory and outside it."""

    weights: int
    activations: int
    libraries: int


def measure_step(
    cuda: Cuda, allocated_before: int, nccl_bytes: int, run_step: Callable[[], Any]
) -> StepMemory:
    """Measure `run_step`, the first step that is run at all.

    allocated_before: torch's bytes before the weights were loaded. nccl_bytes: taken by
    communicators; the bytes of CUDA's other libraries are what was taken on the whole GPU outside
    torch's memory while the step ran. The CUDA context, a third to half of a GiB, is not included:
    CUDA cannot be queried before it exists, and afterwards it looks like the memory of another
    process.
    """
    weights, others = cuda.allocated() - allocated_before, cuda.held_by_others()
    cuda.reset_peak()
    run_step()
    activations = cuda.peak_allocated() - allocated_before - weights
    grown = cuda.held_by_others() - others
    if grown > _MOST_OF_LIBRARIES:
        logger.warning(
            f"{grown} bytes of GPU memory were taken while the first step ran, most of them "
            f"probably by another process: {_MOST_OF_LIBRARIES} are counted for this engine"
        )
    libraries = nccl_bytes + min(max(0, grown), _MOST_OF_LIBRARIES)
    return StepMemory(weights, activations, libraries)


def measure_graphs(cuda: Cuda, sizes: list[int], capture: Callable[[list[int]], Any]) -> int:
    """Return the bytes that the graphs of `sizes` will take.

    `capture(sizes)` captures and returns graphs of these sizes. The largest graph reserves the
    memory that the others then share. The second largest shows how much each other graph adds. The
    first capture also makes a library allocate memory on the capture stream, which is never
    released.
    """

    _, for_good = _bytes_of(cuda, sizes[:1], capture)
    largest, _ = _bytes_of(cuda, sizes[-1:], capture)
    both, _ = _bytes_of(cuda, sizes[-2:], capture)
    return for_good + largest + max(0, both - largest) * (len(sizes) - 1)


def measure_mixed_graphs(cuda: Cuda, sizes: list[int], capture: Callable[[list[int]], Any]) -> int:
    """Return the bytes that the graphs of mixed steps will take, as `measure_graphs` does.

    These sizes range from tens to thousands of tokens and differ more than sizes of decode steps.
    So the amount that each graph adds to the largest is the mean over the smallest and the second
    largest.
    """
    largest, _ = _bytes_of(cuda, sizes[-1:], capture)
    others = sorted({*sizes[:1], *sizes[-2:-1]} - {*sizes[-1:]})
    if not others:
        return largest
    some, _ = _bytes_of(cuda, [*others, sizes[-1]], capture)
    return largest + max(0, some - largest) * (len(sizes) - 1) // len(others)


def _bytes_of(cuda: Cuda, sizes: list[int], capture: Callable[[list[int]], Any]) -> tuple[int, int]:
    """Return the bytes that graphs of `sizes` take, and those still taken after their release."""
    cuda.release_unused()
    before, _ = cuda.memory_info()
    graphs = capture(sizes)
    with_them, _ = cuda.memory_info()
    del graphs
    cuda.release_unused()
    after, _ = cuda.memory_info()
    return max(0, before - with_them), max(0, before - after)
