"""Batch -> device -> model -> logits -> sampled tokens. The executor for one device."""

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.checkpoint.loader import load_weights
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.batch import Batch, BatchLayout
from nanoserve.engine.executor import StepResult
from nanoserve.layers.context import LayerContext
from nanoserve.models.registry import model_class
from nanoserve.outputs import TokenLogprobs
from nanoserve.sampling.sampler import Sampler
from nanoserve.sampling_params import SlotParams
from nanoserve.worker.kv_cache import allocate_kv_cache, decide_num_kv_blocks

logger = logging.getLogger(__name__)


class BatchTensors:
    """The fields of a `Batch` as int32 tensors, over `memory` of the same layout on any device.

    They are attributes of the same names, as long as the field's capacity.
    """

    def __init__(self, layout: BatchLayout, memory: torch.Tensor) -> None:
        first = layout.offsets()
        for name, capacity in layout.fields().items():
            setattr(self, name, memory[first[name] :][: capacity * 4].view(torch.int32))
        self.block_tables = self.block_tables.view(layout.max_num_rows, -1)

    def attention_metadata(self, header: dict[str, int]) -> AttentionMetadata:
        rows = header["num_rows"]
        tokens = slice(0, header["num_tokens"])
        return AttentionMetadata(
            positions=self.positions[tokens],
            slot_mapping=self.slot_mapping[tokens],
            cu_seqlens_q=self.cu_seqlens_q[: rows + 1],
            cu_seqlens_k=self.cu_seqlens_k[: rows + 1],
            context_lens=self.context_lens[:rows],
            block_tables=self.block_tables[:rows],
            num_decode_rows=header["num_decode_rows"],
            max_query_len=header["max_query_len"],
            max_context_len=header["max_context_len"],
        )


class Step(NamedTuple):
    """A step under way: `token_ids` [num_sampled_rows] may not have been computed yet."""

    token_ids: torch.Tensor
    slots: np.ndarray
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


class ModelRunner:
    """Owns the weights, the KV cache and the batch buffers of one device.

    As it stands it runs on a CPU; `nanoserve.worker.gpu_runner` says what a GPU does otherwise.
    Everything that can be refused is refused before the weights are read.
    """

    sampler_class = Sampler

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, path: Path, context: LayerContext
    ) -> None:
        self.config, self.model_config, self.context = config, model_config, context
        self._make_room(decide_num_kv_blocks(config, model_config, context.tp))
        self._load(path)
        self._allocate()

    def submit(self, batch: Batch, sampling: list[SlotParams]) -> Step:
        """Start one step."""
        for change in sampling:
            self.sampler.set_slot(change)
        return self._execute(batch)

    def collect(self, handle: Step) -> StepResult:
        """Wait for a step's tokens."""
        token_ids = handle.token_ids.tolist()
        self.sampler.record(handle.slots, token_ids)
        return StepResult(token_ids, handle.logprobs, handle.prompt_logprobs)

    def close(self) -> None:
        """Release weights and cache, even if somebody still holds the runner."""
        self.model = self.kv_cache = self.sampler = None

    def _make_room(self, num_kv_blocks: int) -> None:
        """With so many blocks: the longest sequence, and the buffers for a step."""
        config = self.config
        self.num_kv_blocks = num_kv_blocks = self.context.tp.smallest(num_kv_blocks)
        self.max_model_len = config.resolve_max_model_len(
            self.model_config.max_position_embeddings, num_kv_blocks
        )
        blocks_per_row = -(-self.max_model_len // config.block_size)
        layout = BatchLayout(config.max_num_batched_tokens, config.max_num_seqs, blocks_per_row)
        self.use_memory(self._host_memory(2 * layout.num_bytes), layout)

    def use_memory(self, memory: np.ndarray, layout: BatchLayout | None = None) -> None:
        """Batches lie in `memory` from now on: uint8, room for two of them."""
        layout = layout or self.batches[0].layout
        first, second = np.split(memory, 2)
        self.batches = (Batch(layout, first), Batch(layout, second))

    def _host_memory(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, dtype=np.uint8)

    def _load(self, path: Path) -> None:
        self.model = model_class(self.model_config.architecture)(self.model_config, self.context)
        is_first = self.context.tp.rank == 0
        load_weights(self.model, path, self.config.load_format, shows_progress=is_first)
        self.sampler = self.sampler_class(
            self.config.max_num_seqs,
            self.model_config.vocab_size,
            self.context.device,
            self.config.logits_processors,
        )

    def _allocate(self) -> None:
        block_size = self.config.block_size
        self.kv_cache = allocate_kv_cache(
            self.model_config, self.num_kv_blocks, block_size, self.context
        )
        if self.config.num_kv_blocks or self.config.kv_cache_memory_bytes:
            self.kv_cache.zero_()  # asked for, so taken now: no step waits for the system
        pool = self.kv_cache.nbytes / 2**30
        logger.info(
            f"{self.model_config.architecture}, {self.model_config.dtype}, {self.num_kv_blocks} KV "
            f"blocks of {block_size} tokens ({pool:.2f} GiB), max_model_len {self.max_model_len}"
        )

    @torch.inference_mode()
    def _execute(self, batch: Batch) -> Step:
        header = batch.header_dict()
        tensors, hidden = self.run_model(batch, header)
        sampled = slice(0, header["num_sampled_rows"])
        slots, rows = batch.slots[sampled], batch.logits_rows[sampled]
        token_ids, logprobs, prompt_logprobs = torch.empty(0), None, None
        asked = slice(sampled.stop, header["num_logits_rows"])
        if asked.start < asked.stop:
            prompt_logprobs = self.sampler.special.prompt_logprobs(
                hidden[tensors.logits_rows[asked]],
                tensors.next_ids[asked],
                batch.slots[asked],
                self.model.compute_logits,
            )
        if sampled.stop:  # else every row is a chunk in the middle of its prompt
            logits = self.model.compute_logits(hidden[tensors.logits_rows[sampled]])
            # Last, because a request's own processors may raise: the other ranks are done by then.
            # The new token's own position takes part in its noise.
            token_ids, logprobs = self.sampler.sample(logits, slots, batch.positions[rows] + 1)
        return Step(token_ids, slots, logprobs, prompt_logprobs)

    def run_model(self, batch: Batch, header: dict[str, int]) -> tuple[BatchTensors, torch.Tensor]:
        """The batch on the device, and the hidden states [num_tokens, hidden_size]."""
        tensors = BatchTensors(batch.layout, torch.from_numpy(batch.memory))
        return tensors, self._forward(tensors, header)

    def _forward(self, tensors: BatchTensors, header: dict[str, int]) -> torch.Tensor:
        input_ids = tensors.input_ids[: header["num_tokens"]]
        return self.model(input_ids, self.kv_cache, tensors.attention_metadata(header))
