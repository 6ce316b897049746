"""The model runner is the executor of one device: batch -> model -> logits -> sampled tokens."""

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nanoserve.attention.recurrent_state import LayerCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.engine.draft_tokens import accept_draft_tokens
from nanoserve.engine.executor import ForwardInputs, SampleInputs, SlotUpdate, StepResult
from nanoserve.models.layers.context import LayerContext
from nanoserve.sampling.diagnostics import errors_of_rows
from nanoserve.sampling.sampler import Sampled, Sampler
from nanoserve.worker.adapters import forward_with_adapters
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cpu_device import Computation, Device, Forward, StepOutput
from nanoserve.worker.given_embeddings import forward_with
from nanoserve.worker.heads import HEADS, Heads
from nanoserve.worker.host_pool import HostPool
from nanoserve.worker.kv_cache import KVCacheLayout, longest_sequence
from nanoserve.worker.load_model import allocate_pool, load_model, with_one_block

logger = logging.getLogger(__name__)


@dataclass
class Handle:
    """A step in flight. Its tensors on the device may not have been computed yet."""

    batch: Batch
    header: BatchHeader
    tensors: BatchTensors
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)  # by slot
    hidden: torch.Tensor | None = None  # [num_sampled, hidden_size]
    logits: torch.Tensor | None = None  # [num_sampled, vocab_size], on rank 0
    of_heads: dict[str, Any] = field(default_factory=dict)
    chosen: StepOutput | None = None  # of a graph that also sampled
    sampled: Sampled | None = None
    fetched: Any = None  # sampled ids, while they are copied to the host


class ModelRunner:
    """The weights, the KV cache and the batch buffers of one device.

    Differences between a GPU and a CPU are confined to the `Device` object.
    """

    host_pool: HostPool | None = None  # for blocks that the KV cache has evicted

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        context: LayerContext,
        device: Device,
        model: nn.Module,
        kv_cache_layout: KVCacheLayout,
        kv_caches: list[LayerCache],
        num_kv_blocks: int,
        max_model_len: int,
    ) -> None:
        """Assemble a runner from its parts, and allocate its buffers and its sampler.

        path: the checkpoint, from which the weights can be read again. num_kv_blocks: the number of
        blocks that the scheduler may allocate; `kv_caches` may have fewer if all rows are dummies.
        """
        self.config, self.model_config = config, model_config
        self.path, self.context, self.device = path, context, device
        self.model, self.kv_cache_layout, self.kv_caches = model, kv_cache_layout, kv_caches
        self.num_kv_blocks, self.max_model_len = num_kv_blocks, max_model_len
        num_slots = config.max_num_seqs
        most_blocks = blocks_needed(max_model_len, config.block_size)
        names, num_groups = tuple(HEADS.names()), len(kv_cache_layout.groups)
        self.layout = BatchLayout(
            config.max_num_batched_tokens, num_slots, most_blocks, names, num_groups
        )
        self.heads = Heads(num_slots, context.routed_experts)
        self.sampler = self._make_sampler()
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=context.device)
        self._num_batches = 0
        self._computation: Computation | None = None
        self._prepare_device()
        self.use_memory(device.host_memory(2 * self.layout.num_bytes))

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        context: LayerContext,
        device: Device,
    ) -> "ModelRunner":
        """Load the checkpoint in `path` and return a runner that is ready to serve.

        Raises `ValueError` for every setting that can be rejected before the weights are read. The
        block pool of a CPU is sized before the weights are loaded; on a GPU it gets the memory that
        is left after everything else.
        """
        layout = KVCacheLayout.of(config, model_config, context)
        parallel, memory_bytes = context.parallel, device.memory_bytes(context.parallel)
        with device.guard():
            # 1) Without weights, if possible: the size of the pool, and of the longest sequence in
            # it.
            pool = config, model_config, layout, memory_bytes
            num_kv_blocks, max_model_len = device.num_kv_blocks(*pool), config.max_model_len
            if num_kv_blocks is not None:
                num_kv_blocks = parallel.smallest(num_kv_blocks)
                max_model_len = longest_sequence(config, model_config, num_kv_blocks)
            # 2) The weights.
            model = load_model(config, model_config, path, context, max_model_len, memory_bytes)
            make = partial(cls, config, model_config, path, context, device, model, layout)
            # 3) The pool, if it is what the weights have left.
            if num_kv_blocks is None:
                profiled = partial(with_one_block, make, config, model_config, layout, context)
                measured = device.measure_kv_blocks(model_config, layout, parallel, profiled)
                num_kv_blocks = parallel.smallest(measured)
                max_model_len = longest_sequence(config, model_config, num_kv_blocks)
            # 4) The runner; its warm-up compiles what would otherwise be compiled while serving.
            logger.info("max_model_len %d", max_model_len)
            kv_caches = allocate_pool(config, model_config, layout, num_kv_blocks, context.device)
            runner = make(kv_caches, num_kv_blocks, max_model_len)
            runner.host_pool = HostPool.of(config, model_config, kv_caches, context, device)
            runner.warm_up()
        return runner

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now, so that no request has to wait for it."""
        with self.device.guard():
            self.device.warm_up(self)

    def use_memory(self, memory: np.ndarray) -> None:
        """Place the batches in `memory`: uint8, room for two or more, which are used in turn."""
        self.device.lock(memory)
        self.batches = [Batch(self.layout, m) for m in memory.reshape(-1, self.layout.num_bytes)]

    def next_batch(self) -> Batch:
        """Return the next batch to pack; its previous step has been collected or cancelled."""
        batch = self.batches[self._num_batches % len(self.batches)]
        self.device.wait_until_read(batch)
        # Step numbers have 31 bits. No number is used twice in a row, even if a step fails: workers
        # check it to see whether a batch is still the one that was announced to them.
        batch.step, self._num_batches = self._num_batches, (self._num_batches + 1) % 2**31
        return batch

    def fill_slots(self, updates: list[SlotUpdate]) -> None:
        """Store the sampling parameters of sequences new in their slots; on rank 0 only."""
        for update in updates:
            self.sampler.set_slot(update)
            if update.prompt_head is not None:
                self.heads[update.prompt_head].set_slot(update)

    @torch.inference_mode()
    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        """Launch one step up to the logits. This is all that ranks other than 0 do."""
        self.fill_slots(inputs.slot_updates)
        if inputs.draft_tokens:
            self.kv_cache_layout.states.reject_drafts()
        header, model = batch.header, self.model
        with self.device.guard():
            if inputs.kv_transfers is not None:
                self.host_pool.copy(self.kv_caches, inputs.kv_transfers)
            # 1) Rank 0's device has the tokens that the host did not know when it packed the step.
            if header.num_pending:
                self.context.tp.broadcast(self.last_token)
            # 2) The model: hidden states [num_tokens, hidden_size], after its last norm.
            forward: Forward = self._computation.forward
            if inputs.embeds is not None:
                forward = forward_with(inputs.embeds, self._computation, self.context)
            if (rows := inputs.adapters) is not None:
                adapters, starts = self.context.adapters, batch.cu_seqlens_q
                forward = forward_with_adapters(rows, starts, forward, adapters)
            output = self.device.run(batch, header, self.last_token, forward)
            handle = Handle(batch, header, output.tensors, inputs.draft_tokens)
            # 3) Logits are computed only for the rows that need them: for a prompt of a thousand
            # tokens and a vocabulary of 151,936 they would take 600 MB, and one row is sampled.
            if self.heads.reads_all_tokens or header.num_outputs > header.num_sampled:
                handle.of_heads = self.heads.run(
                    batch, header, output.tensors, output.hidden, model.compute_logits
                )
            # No row is sampled if each one is a chunk that ends before the end of its prompt.
            if output.token_ids is not None:
                handle.chosen = output
            elif header.num_sampled:
                self._compute_logits(handle, output.hidden)
        return handle

    def _compute_logits(self, handle: Handle, hidden: torch.Tensor) -> None:
        handle.hidden = hidden[handle.tensors.output_rows[: handle.header.num_sampled]]
        handle.logits = self.model.compute_logits(handle.hidden)

    @torch.inference_mode()
    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        """Launch the sampling of the next tokens, and keep them as inputs of the next step."""
        with self.device.guard():
            if not handle.header.num_sampled:
                # A step of chunks inside prompts samples nothing, but `collect` waits for it too.
                handle.fetched = self.device.fetch(self.last_token[:0])
                return
            if handle.chosen is None or inputs.token_masks:
                handle.sampled = self._sample(handle, inputs)
            else:  # the graph has also kept them for the next step
                token_ids = handle.chosen.token_ids
                handle.sampled = Sampled(token_ids, None, np.zeros(0, dtype=np.int64), [], {})
            handle.fetched = self.device.fetch(handle.sampled.token_ids)

    def _sample(self, handle: Handle, inputs: SampleInputs) -> Sampled:
        batch, tensors, num_sampled = handle.batch, handle.tensors, handle.header.num_sampled
        if handle.chosen is not None:  # a graph sampled without these token masks: sample again
            self._compute_logits(handle, handle.chosen.hidden)
        sampled = self.sampler.sample(
            handle.logits,
            batch.output_slots[:num_sampled].copy(),
            # The noise of a new token depends on the position of this token.
            batch.positions[batch.output_rows[:num_sampled]] + 1,
            tensors,
            handle.draft_tokens,
            inputs.token_masks,
        )
        if self.config.async_scheduling:
            self._computation.keep(sampled.token_ids, tensors.output_slots[:num_sampled])
        return sampled

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step's tokens, and return those that each row gets."""
        token_ids, sampled = self.device.wait(handle.fetched), handle.sampled
        # Heads and log-probabilities started their copies to the host earlier: these are complete.
        of_heads = self.heads.collect(handle.of_heads)
        if sampled is None:
            return StepResult([], of_heads=of_heads)
        # 1) By output: its token, or the error because of which it has none.
        new_ids, errors = [[token_id] for token_id in token_ids], sampled.errors
        if -1 in token_ids:
            errors = errors_of_rows(token_ids, handle.logits, sampled, self.config)
        for output in errors:
            new_ids[output] = []
        # 2) By row: the draft tokens that are accepted, and the token after them.
        slots = handle.batch.output_slots[: len(new_ids)]
        rows = accept_draft_tokens(new_ids, slots, handle.draft_tokens)
        rows.extend_states(dict(sampled.states))
        logprobs = None
        places: list[tuple[int, int]] = []
        if sampled.logprobs is not None:
            logprobs, places = sampled.logprobs.keep(rows.places(sampled.logprob_rows.tolist()))
        return StepResult(
            token_ids=rows.token_ids,
            logprobs=logprobs,
            logprob_places=places,
            errors=rows.errors(errors) if errors else {},
            of_heads=of_heads,
            hidden=handle.hidden,
            hidden_rows=rows.last_outputs,
        )

    def cancel(self, handles: list[Handle]) -> None:
        """Do nothing: steps on the device run to their end, and their results are dropped."""

    def release_kv_caches(self) -> None:
        """Release the memory of the KV cache; no step can run until `resume`."""
        with self.device.guard():
            self.device.finish()
            self.device.drop_programs()  # graphs hold the addresses of these tensors
            self.kv_caches = self._computation = None
            self.device.release_unused()

    def release_weights(self, keeps_them: bool) -> None:
        """Move the weights to the host's memory, or drop them; after `release_kv_caches`."""
        with self.device.guard():
            if not keeps_them:
                self.model = self.sampler = None
            elif self.model is not None:
                self.model.to("cpu")
            self.device.release_unused()

    def restore_weights(self) -> None:
        """Bring weights that were kept back to the device."""
        with self.device.guard():
            self.model.to(self.context.device)

    def use_model(self, model: nn.Module) -> None:
        """Replace the model; no step is in flight, and none can run until `resume`."""
        with self.device.guard():
            self.device.drop_programs()  # graphs hold the addresses of the weights
            self.model, self.sampler = model, self.sampler or self._make_sampler()

    def restore_kv_caches(self) -> None:
        """Allocate the KV cache again, with as many blocks as before."""
        with self.device.guard():
            shape = self.kv_cache_layout, self.num_kv_blocks, self.context.device
            self.kv_caches = allocate_pool(self.config, self.model_config, *shape)

    def resume(self) -> None:
        """Make the runner ready for steps again, once weights and KV cache are restored."""
        with self.device.guard():
            self._prepare_device()
        self.warm_up()

    def close(self) -> None:
        """Release weights and cache, even if the runner is still referenced."""
        self.device.finish()
        self.model = self.kv_caches = self.sampler = self.last_token = self.batches = None
        self.host_pool = self._computation = None
        self.device.close()

    def _make_sampler(self) -> Sampler:
        return self.device.sampler_class(
            self.config.max_num_seqs,
            self.model_config.vocab_size,
            self.context.device,
            self.config.logits_processors,
            logprobs_mode=self.config.logprobs_mode,
        )

    def _prepare_device(self) -> None:
        self._computation = Computation(
            self.model,
            self.kv_caches,
            self.sampler,
            self.last_token,
            self.config.block_size,
            self.max_model_len,
            self.context.adapters,
        )
        self.device.prepare(self.layout, self._computation)
