"""Batch -> device -> model -> logits -> sampled tokens. The executor of one device."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.engine.draft_tokens import AcceptedRows, accept_draft_tokens
from nanoserve.engine.executor import ForwardInputs, SampleInputs, SlotUpdate, StepResult
from nanoserve.layers.context import LayerContext
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.sampler import Sampled
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.heads import Heads
from nanoserve.worker.host_device import HostDevice
from nanoserve.worker.startup import start


@dataclass
class Handle:
    """A step under way. What lies on the device may not have been computed yet."""

    batch: Batch
    header: BatchHeader
    tensors: BatchTensors
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)  # by slot
    hidden: torch.Tensor | None = None  # [num_sampled, hidden_size]
    logits: torch.Tensor | None = None  # [num_sampled, vocab_size], on rank 0
    of_heads: dict[str, Any] = field(default_factory=dict)
    sampled: Sampled | None = None
    fetched: Any = None  # the sampled ids on their way to the host


class ModelRunner:
    """Owns the weights, the KV cache and the batch buffers of one device.

    What a GPU does otherwise than a CPU is its device's to know. From `start` it has `model`,
    `sampler`, `kv_caches` (one for each layer here) and their size `num_kv_blocks`,
    `max_model_len`, and the `layout` of its two `batches`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        path: Path,
        context: LayerContext,
        device: HostDevice,
    ) -> None:
        self.config, self.model_config = config, model_config
        self.path, self.context, self.device = path, context, device
        self.heads = Heads(config.max_num_seqs)
        self._num_batches = 0
        # By slot, the token that was sampled last: the next step's input, before the host knows it.
        # The last place is for tokens of padding rows.
        num_slots = config.max_num_seqs
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=context.device)
        start(self, path)

    def use_memory(self, memory: np.ndarray) -> None:
        """Batches lie in `memory` from now on: uint8, room for two or more, used in turn."""
        self.device.lock(memory)
        self.batches = [Batch(self.layout, m) for m in memory.reshape(-1, self.layout.num_bytes)]

    def next_batch(self) -> Batch:
        """The one before last: its step has been collected, or was given up."""
        batch = self.batches[self._num_batches % len(self.batches)]
        self.device.wait_until_read(batch)
        # In 31 bits, and never given twice in a row, also if a step fails: workers tell by it
        # whether a batch is still the one that was announced to them.
        batch.step, self._num_batches = self._num_batches, (self._num_batches + 1) % 2**31
        return batch

    def fill_slots(self, updates: list[SlotUpdate]) -> None:
        """Take how to sample for sequences that are new in their slots; on rank 0 only."""
        for update in updates:
            self.sampler.set_slot(update)
            if update.prompt_head is not None:
                self.heads[update.prompt_head].set_slot(update)

    @torch.inference_mode()
    def forward(self, batch: Batch, inputs: ForwardInputs) -> Handle:
        """Launch one step, as far as the logits. Every rank does this, and only this."""
        self.fill_slots(inputs.slot_updates)
        header = batch.header
        with self.device.guard():
            # 1) Tokens that the host did not know when it packed the step are on rank 0's device.
            if header.num_pending:
                self.context.tp.broadcast(self.last_token)
            # 2) The model: hidden states [num_tokens, hidden_size], after its last norm.
            tensors, hidden = self.device.run(batch, header, self.last_token, self.run_model)
            handle = Handle(batch, header, tensors, inputs.draft_tokens)
            # 3) Only the rows that are wanted become logits: a prompt of a thousand tokens
            #    and a vocabulary of 151,936 would be 600 MB of them, of which one row is sampled.
            if header.num_outputs > header.num_sampled:
                compute_logits = self.model.compute_logits
                handle.of_heads = self.heads.run(batch, header, tensors, hidden, compute_logits)
            if header.num_sampled:  # else every row is a chunk in the middle of its prompt
                rows = tensors.output_rows[: header.num_sampled]
                handle.hidden = hidden[rows]
                handle.logits = self.model.compute_logits(handle.hidden)
        return handle

    @torch.inference_mode()
    def sample(self, handle: Handle, inputs: SampleInputs) -> None:
        """Launch the choice of the next tokens, and keep them for a step ahead."""
        batch, tensors, num_sampled = handle.batch, handle.tensors, handle.header.num_sampled
        with self.device.guard():
            if not num_sampled:  # a step inside of prompts yields nothing, and is waited for too
                handle.fetched = self.device.fetch(self.last_token[:0])
                return
            handle.sampled = self.sampler.sample(
                handle.logits,
                batch.output_slots[:num_sampled].copy(),
                # A new token's own position takes part in its noise.
                batch.positions[batch.output_rows[:num_sampled]] + 1,
                tensors,
                handle.draft_tokens,
                inputs.token_masks,
            )
            if self.config.async_scheduling:
                self.keep(handle.sampled.token_ids, tensors.output_slots[:num_sampled])
            handle.fetched = self.device.fetch(handle.sampled.token_ids)

    def keep(self, token_ids: torch.Tensor, slots: torch.Tensor) -> None:
        """Put sampled tokens, int64 [num_rows], where a step ahead finds them by slot."""
        # Also what is no token must be one to the step ahead, whose row is thrown away.
        self.last_token[slots] = token_ids.clamp(min=0).int()

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step's tokens, and say which of them each row gets."""
        of_heads = {name: self.heads[name].collect(made) for name, made in handle.of_heads.items()}
        token_ids, sampled = self.device.wait(handle.fetched), handle.sampled
        if sampled is None:
            return StepResult([], of_heads=of_heads)
        # 1) By output: its token, or why it has none.
        new_ids, errors = [[token_id] for token_id in token_ids], sampled.errors
        if -1 in token_ids:
            from nanoserve.sampling.no_token import errors_of_rows

            errors = errors_of_rows(token_ids, handle.logits, sampled, self.config)
        for output in errors:
            new_ids[output] = []
        # 2) By row: the draft tokens that are accepted, and the token after them.
        slots = handle.batch.output_slots[: len(new_ids)]
        rows = accept_draft_tokens(new_ids, slots, handle.draft_tokens)
        if sampled.states:
            states = dict(sampled.states)
            for first, accepted in zip(rows.first_outputs, rows.token_ids, strict=True):
                if first in states:
                    states[first].extend(accepted)
        logprobs, places = None, []
        if sampled.logprobs is not None:
            logprobs, places = _logprobs_by_row(sampled, rows)
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
        """Do nothing: what runs on the device runs to its end without being waited for."""

    def close(self) -> None:
        """Release weights and cache, even if the runner is still referenced."""
        self.device.finish()
        self.model = self.kv_caches = self.sampler = self.last_token = self.batches = None
        self.device.close()

    def run_model(
        self, tensors: BatchTensors, header: BatchHeader, block_tables: torch.Tensor
    ) -> torch.Tensor:
        metadata = tensors.attention_metadata(header, block_tables)
        return self.model(tensors.input_ids[: header.num_tokens], self.kv_caches, metadata)


def _logprobs_by_row(
    sampled: Sampled, rows: AcceptedRows
) -> tuple[TokenLogprobs, list[tuple[int, int]]]:
    """Return the entries of tokens that a row gets, and for each (row, index among its tokens)."""
    logprobs = sampled.logprobs.to_host()
    places = rows.places(sampled.logprob_rows.tolist())
    kept = [entry for entry, place in enumerate(places) if place is not None]
    if len(kept) < len(places):
        logprobs = logprobs.take(kept)
    return logprobs, [places[entry] for entry in kept]
