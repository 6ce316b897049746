"""The KV cache: how many blocks fit, and the memory they take.

Worked numbers (the course's first chapter): LLaMA-2-7B in 16 bits keeps half a MiB per token, so
4,096 reserved tokens a user are 2 GiB, and 64 GiB serve 32 users; in blocks of 16, a user of 300
tokens takes 19 blocks = 152 MiB, and the same 64 GiB serve 431.
"""

import math
import os
from typing import Any

import torch

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.block_manager import blocks_needed
from nanoserve.kernels_cpu.memory import map_zeros
from nanoserve.layers.context import LayerContext, ParallelContext

_GIB = 2**30
_ALONE = ParallelContext()


def kv_block_bytes(
    model_config: ModelConfig,
    block_size: int,
    parallel: ParallelContext = _ALONE,
    dtype: str = "auto",
) -> int:
    """Bytes of K and V of one block over all layers, on one rank; `dtype` is `kv_cache_dtype`."""
    share = parallel.tp.slices(model_config.num_key_value_heads, "num_key_value_heads")
    num_layers = model_config.num_hidden_layers
    num_here = len(parallel.pp.layers_of(num_layers))
    token_bytes = model_config.kv_bytes_per_token(dtype) // num_layers * num_here
    return block_size * token_bytes // share


def decide_num_kv_blocks(
    config: EngineConfig,
    model_config: ModelConfig,
    parallel: ParallelContext = _ALONE,
    memory_bytes: int | None = None,
) -> int:
    """Usable blocks, without the dummy block 0, of a rank with so much memory (a CPU's if None).

    An explicit number wins, then an explicit amount of memory. By default: what `max_num_seqs`
    sequences of full length need, within a quarter of the memory and 4 GiB.
    """
    block_bytes = kv_block_bytes(model_config, config.block_size, parallel, config.kv_cache_dtype)
    memory_bytes = memory_bytes or physical_memory_bytes() // parallel.num_ranks
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        from nanoserve.worker.explicit_pool import explicit_num_kv_blocks

        return explicit_num_kv_blocks(config, block_bytes, memory_bytes)
    budget = min(4 * _GIB, memory_bytes // 4)
    return max(1, min(blocks_wanted(config, model_config), budget // block_bytes - 1))


def blocks_wanted(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the number of blocks that `max_num_seqs` sequences of full length need."""
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    return config.max_num_seqs * blocks_needed(max_model_len, config.block_size)


def allocate_kv_cache(
    model_config: ModelConfig, num_kv_blocks: int, block_size: int, context: LayerContext
) -> Any:
    """One tensor [num_layers, *attention.kv_cache_shape()], zeroed; in fewer bits than the model's
    it is a `nanoserve.attention.quantized_kv.QuantizedKVCache`.

    Zeroed, because rows that only fill up a batch read the dummy block. On a CPU the memory comes
    straight from the system, which maps a page when it is first used: an ample pool costs nothing
    until then. Large pages, where the system has them, make the reading of scattered blocks an
    eighth faster.
    """
    num_kv_heads = model_config.num_key_value_heads
    num_kv_heads //= context.tp.slices(num_kv_heads, "num_key_value_heads")
    shape = context.attention.kv_cache_shape(
        num_kv_blocks + 1, block_size, num_kv_heads, model_config.head_dim
    )
    shape = (len(context.pp.layers_of(model_config.num_hidden_layers)), *shape)
    if context.attention.kv_cache_dtype == "auto":
        return _zeros(shape, context.dtype, context.device)
    from nanoserve.attention.quantized_kv import QuantizedKVCache

    return QuantizedKVCache.allocate(shape, context, _zeros)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return map_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
