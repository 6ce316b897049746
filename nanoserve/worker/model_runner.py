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
        self.sampler = Sampler(config.max_num_seqs, model_config.vocab_size, self.device)
        logger.info(
            "%s, %s, %d KV blocks of %d tokens (%.2f GiB), max_model_len %d",
            *(model_config.architecture, model_config.dtype, self.num_kv_blocks, config.block_size),
            self.num_kv_blocks * kv_block_bytes(model_config, config.block_size) / 2**30,
            self.max_model_len,
        )

    def submit(self, batch: Batch, sampling: list[SlotParams]) -> StepResult:
        """Run one step. On a CPU nothing overlaps, so the handle is the result itself."""
        for change in sampling:
            self.sampler.set_slot(change.slot, change.params, change.seed)
        return StepResult(self._execute(batch))

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        """Release weights and cache, even if somebody still holds the runner."""
        self.model = self.kv_cache = self.sampler = None

    @torch.inference_mode()
    def _execute(self, batch: Batch) -> list[int]:
        header = batch.header_dict()
        num_tokens, num_logits_rows = header["num_tokens"], header["num_logits_rows"]
        input_ids = torch.from_numpy(batch.input_ids[:num_tokens])
        positions = torch.from_numpy(batch.positions[:num_tokens])
        metadata = _attention_metadata(batch, header)
        hidden = self.model(input_ids, positions, self.kv_cache, metadata)
        if num_logits_rows == 0:
            return []  # every row is a chunk in the middle of its prompt
        rows = batch.logits_rows[:num_logits_rows]
        logits = self.model.compute_logits(hidden[torch.from_numpy(rows)])
        # The new token's own position takes part in its noise.
        return self.sampler.sample(
            logits, batch.slots[:num_logits_rows], batch.positions[rows] + 1
        ).tolist()


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
