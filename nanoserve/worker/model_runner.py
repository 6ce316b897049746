"""Batch -> device -> model -> logits -> sampled tokens. The executor for one device."""

import logging
from pathlib import Path

import numpy as np
import torch

from nanoserve.attention.interface import AttentionBackend, AttentionMetadata
from nanoserve.attention.torch import TorchAttention
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.engine.batch import Batch, BatchLayout
from nanoserve.engine.executor import SlotParams, StepResult
from nanoserve.layers.context import LayerContext
from nanoserve.models.registry import model_class
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.sampler import Sampler
from nanoserve.worker.kv_cache import allocate_kv_cache, decide_num_kv_blocks, kv_block_bytes
from nanoserve.worker.loader import load_weights

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the weights, the KV cache and the batch buffers of one device.

    Everything that can be refused is refused before the weights are read.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, path: Path) -> None:
        cls = model_class(model_config.architecture)
        self.device = torch.device("cpu")
        self.num_kv_blocks = decide_num_kv_blocks(config, model_config)
        self.max_model_len = config.resolve_max_model_len(
            model_config.max_position_embeddings, self.num_kv_blocks
        )
        self.batches = _allocate_batches(config, self.max_model_len)

        dtype = getattr(torch, model_config.dtype)
        attention: AttentionBackend = TorchAttention()
        self.model = cls(model_config, LayerContext(dtype, self.device, attention=attention))
        load_weights(self.model, path, config.load_format)
        self.kv_cache = allocate_kv_cache(
            model_config, self.num_kv_blocks, config.block_size, attention, dtype, self.device
        )
        self.sampler = Sampler(
            config.max_num_seqs, model_config.vocab_size, self.device, config.logits_processors
        )
        pool = self.num_kv_blocks * kv_block_bytes(model_config, config.block_size) / 2**30
        logger.info(
            f"{model_config.architecture}, {model_config.dtype}, {self.num_kv_blocks} KV blocks of "
            f"{config.block_size} tokens ({pool:.2f} GiB), max_model_len {self.max_model_len}"
        )

    def submit(self, batch: Batch, sampling: list[SlotParams]) -> StepResult:
        """Run one step. On a CPU nothing overlaps, so the handle is the result itself."""
        for change in sampling:
            self._set_slot(change)
        return self._execute(batch)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        """Release weights and cache, even if somebody still holds the runner."""
        self.model = self.kv_cache = self.sampler = None

    def _set_slot(self, change: SlotParams) -> None:
        state = None
        if change.params.changes_logits or self.sampler.processors:
            from nanoserve.sampling.processors import SlotState

            state = SlotState(
                change.params,
                change.prompt_token_ids,
                change.output_token_ids,
                change.stop_token_ids,
                change.bad_words_token_ids,
            )
        self.sampler.set_slot(change.slot, change.params, change.seed, change.stream, state)

    @torch.inference_mode()
    def _execute(self, batch: Batch) -> StepResult:
        header = batch.header_dict()
        num_tokens, num_sampled = header["num_tokens"], header["num_sampled_rows"]
        input_ids = torch.from_numpy(batch.input_ids[:num_tokens])
        positions = torch.from_numpy(batch.positions[:num_tokens])
        metadata = _attention_metadata(batch, header)
        hidden = self.model(input_ids, positions, self.kv_cache, metadata)
        prompt_logprobs = None
        if header["num_logits_rows"] > num_sampled:
            prompt_logprobs = self._prompt_logprobs(batch, hidden)
        if num_sampled == 0:  # every row is a chunk in the middle of its prompt
            return StepResult([], None, prompt_logprobs)
        rows, slots = batch.logits_rows[:num_sampled], batch.slots[:num_sampled]
        logits = self.model.compute_logits(hidden[torch.from_numpy(rows)])
        # The new token's own position takes part in its noise.
        token_ids = self.sampler.sample(logits, slots, batch.positions[rows] + 1)
        logprobs = self.sampler.logprobs(logits, token_ids, slots)
        return StepResult(token_ids.tolist(), logprobs, prompt_logprobs)

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> TokenLogprobs:
        """In slices of at most as many rows as decoding ever has, to bound the logits' memory."""
        from nanoserve.sampling.logprobs import concatenate, gather_logprobs

        header, size = batch.header_dict(), batch.layout.max_num_rows
        begin, end = header["num_sampled_rows"], header["num_logits_rows"]
        k = int(self.sampler.num_prompt_logprobs[batch.slots[begin:end]].max())
        parts = []
        for first in range(begin, end, size):
            span = slice(first, min(first + size, end))
            logits = self.model.compute_logits(hidden[torch.from_numpy(batch.logits_rows[span])])
            parts.append(gather_logprobs(logits, torch.from_numpy(batch.next_ids[span]), k))
        return concatenate(parts)


def _attention_metadata(batch: Batch, header: dict[str, int]) -> AttentionMetadata:
    rows = header["num_rows"]
    return AttentionMetadata(
        slot_mapping=torch.from_numpy(batch.slot_mapping[: header["num_tokens"]]),
        cu_seqlens_q=torch.from_numpy(batch.cu_seqlens_q[: rows + 1]),
        cu_seqlens_k=torch.from_numpy(batch.cu_seqlens_k[: rows + 1]),
        context_lens=torch.from_numpy(batch.context_lens[:rows]),
        block_tables=torch.from_numpy(batch.block_tables[:rows]),
        num_decode_rows=header["num_decode_rows"],
        max_query_len=header["max_query_len"],
        max_context_len=header["max_context_len"],
    )


def _allocate_batches(config: EngineConfig, max_model_len: int) -> tuple[Batch, Batch]:
    layout = BatchLayout(
        config.max_num_batched_tokens, config.max_num_seqs, -(-max_model_len // config.block_size)
    )
    return (
        Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8)),
        Batch(layout, np.zeros(layout.num_bytes, dtype=np.uint8)),
    )
