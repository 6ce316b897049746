"""Runs every variant of the Triton kernels that a configuration can reach, before serving.

Triton compiles a kernel again for each combination of its constants, which takes one to two seconds
in which all requests would wait. Compiled kernels are cached on disk, so this time is spent once on
a machine, and later starts only run a few small steps. The variants depend on

    tokens of a step    tile sizes of nanoserve's own products, and whether they split their inputs
    tokens of a row     attention over chunks; with graphs of draft tokens, over few tokens too
    sampling of a row   from logits in the model's dtype, or in float32 once stages have changed
                        them; with or without a filter; with or without a grammar's mask
    adapters            `adapter_kernels`, for each shape of a linear layer

Other values that change from step to step are not constants of a kernel. The worst-case step, which
is run before, has the largest tiles.
"""

import logging
import time
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import torch

from nanoserve.config import EngineConfig, KernelConfig
from nanoserve.engine.executor import Executor, ForwardInputs, SlotUpdate, TokenMask
from nanoserve.sampling.fused_sampler import FusedSampler
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.adapters import dummy_adapters
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.dummy_rows import pack_dummy_step
from nanoserve.worker.gpu_memory import most_outputs

logger = logging.getLogger(__name__)

# Numbers of tokens. Together with 1 and the worst case, these reach each tile size of quantized
# products and of those that split their inputs, with the most and the fewest programs.
_TILED_SIZES = (17, 128, 129, 256)
_GRAMMAR_PACKAGES = ("llguidance", "xgrammar")
_PLAIN, _FILTERED = SamplingParams(temperature=0), SamplingParams(top_p=0.9)
_KINDS = (
    _PLAIN,
    _FILTERED,
    SamplingParams(temperature=0, repetition_penalty=1.1),
    SamplingParams(top_p=0.9, repetition_penalty=1.1),
)


@torch.inference_mode()
def compile_kernels(executor: Executor, buffers: CudaBuffers, config: EngineConfig) -> None:
    """Run `dummy_steps` in the longest contexts, then each kind of sampling; on every rank."""
    start = time.perf_counter()
    batch = buffers.new_batch()
    for lengths in dummy_steps(config, executor.max_model_len):
        buffers.wait_until_read(batch)
        pack_dummy_step(
            batch,
            lengths,
            config.block_size,
            num_sampled=min(int(lengths.sum()), most_outputs(config)),
            max_context_len=executor.max_model_len,
        )
        handle = executor.forward(batch, ForwardInputs())
    adapters = dummy_adapters(config, len(lengths))
    if adapters is not None:
        buffers.wait_until_read(batch)
        handle = executor.forward(batch, ForwardInputs(adapters=adapters))
    if handle.logits is not None:  # None if another rank samples
        _run_sampler(handle.logits, handle.tensors, config)
    logger.info(
        "all kernel variants were compiled or loaded, and run, in %.1f s",
        time.perf_counter() - start,
    )


def dummy_steps(config: EngineConfig, max_model_len: int) -> Iterator[np.ndarray]:
    """Yield the new tokens of each row, ascending, of steps that together run every variant.

    The last step has the most rows.
    """
    budget, rows = config.max_num_batched_tokens, config.max_num_seqs
    drafts = config.speculative_config
    has_few = drafts is not None and not drafts.enforce_eager
    most_few = drafts.num_speculative_tokens + 1 if has_few else 1
    # 1) A single chunk; rows of few tokens have a kernel variant for each power of two.
    few = [2**n for n in range(1, (most_few - 1).bit_length() + 1)]
    for length in (most_few + 1, *few):
        yield np.array([min(length, budget, max_model_len)], dtype=np.int32)
    # 2) Steps of a given number of tokens, in rows of one token where max_num_seqs allows it.
    has_tiles = (
        config.quantization is not None or KernelConfig.of(config.kernel_config).split_products
    )
    sizes = {1, rows, *(_TILED_SIZES if has_tiles else ())}
    for size in sorted(min(size, budget, rows * max_model_len) for size in sizes):
        used = min(size, rows)
        lengths = np.full(used, size // used, dtype=np.int32)
        lengths[used - size % used :] += 1
        yield lengths


def has_grammars(config: EngineConfig) -> bool:
    """Return True if requests may have grammars, and with them token masks."""
    is_installed = any(find_spec(name) is not None for name in _GRAMMAR_PACKAGES)
    is_configured = config.structured_outputs_config is not None
    return not config.skip_tokenizer_init and (is_installed or is_configured)


def _run_sampler(logits: torch.Tensor, tensors: BatchTensors, config: EngineConfig) -> None:
    """Sample two rows of a step in every way; more rows use the same kernel variants."""
    logits = logits[:2]
    slots = np.arange(len(logits))
    is_dependent = KernelConfig.of(config.kernel_config).dependent_launch
    sampler = FusedSampler(len(slots), logits.shape[1], logits.device, is_dependent=is_dependent)

    def sample(first: SamplingParams, last: SamplingParams, masks: dict[int, TokenMask]) -> None:
        for slot, params in ((0, first), (len(slots) - 1, last)):
            sampler.set_slot(SlotUpdate(slot, params, seed=0))
        sampler.sample(logits, slots, slots, tensors, token_masks=masks)

    for params in _KINDS:
        sample(params, params, {})
    if has_grammars(config):
        # A filtered row has its mask as a stage; such a row may be next to one without.
        for last in (_PLAIN, _FILTERED):
            sample(_PLAIN, last, {0: _Anything()})


class _Anything:
    """A mask that allows every token."""

    def first_illegal(self, token_ids: list[int]) -> int | None:
        return None

    def fill(self, index: int, mask: np.ndarray) -> None:
        mask[:] = -1
