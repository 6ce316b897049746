"""How many KV blocks fit, and the memory they take.

Worked numbers (the course's first chapter): LLaMA-2-7B in 16 bits keeps half a MiB per token, so
4,096 reserved tokens a user are 2 GiB, and 64 GiB serve 32 users; in blocks of 16, a user of 300
tokens takes 19 blocks = 152 MiB, and the same 64 GiB serve 431.
"""

import math
import os

import numpy as np
import torch

from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers.context import LayerContext

_GIB = 2**30


def kv_block_bytes(model_config: ModelConfig, block_size: int) -> int:
    """Bytes of K and V of one block over all layers."""
    return block_size * model_config.kv_bytes_per_token()


def decide_num_kv_blocks(config: EngineConfig, model_config: ModelConfig) -> int:
    """Usable blocks, without the dummy block 0.

    An explicit number wins, then an explicit amount of memory. By default: what `max_num_seqs`
    sequences of full length need, within a quarter of the machine's memory and 4 GiB.
    """
    block_bytes = kv_block_bytes(model_config, config.block_size)
    asked = config.kv_cache_memory_bytes or (config.num_kv_blocks or 0) * block_bytes
    if asked > _physical_memory_bytes():
        raise ValueError(
            f"the KV pool asked for takes {asked} bytes; this machine has "
            f"{_physical_memory_bytes()}"
        )
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
        if budget < 2 * block_bytes:
            raise ValueError(
                f"kv_cache_memory_bytes={budget} holds no KV block: one takes {block_bytes} "
                f"bytes, and one more is the dummy block"
            )
        return budget // block_bytes - 1
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    wanted = config.max_num_seqs * -(-max_model_len // config.block_size)
    budget = min(4 * _GIB, _physical_memory_bytes() // 4)
    return max(1, min(wanted, budget // block_bytes - 1))


def allocate_kv_cache(
    model_config: ModelConfig, num_kv_blocks: int, block_size: int, context: LayerContext
) -> torch.Tensor:
    """One tensor [num_layers, *attention.kv_cache_shape()], zeroed.

    Zeroed, because masked positions of a padded batch are multiplied by weight 0, and 0 x NaN is
    NaN. On a CPU numpy's zeros come straight from the system, which maps a page when it is first
    used: an ample pool costs nothing until then, where torch.zeros would write all of it now.
    """
    shape = context.attention.kv_cache_shape(
        num_kv_blocks + 1, block_size, model_config.num_key_value_heads, model_config.head_dim
    )
    shape, dtype = (model_config.num_hidden_layers, *shape), context.dtype
    if context.device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=context.device)
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
