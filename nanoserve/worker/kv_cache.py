"""The KV cache of one rank: the number of blocks that fit, and the memory they take.

Worked example (the course's first chapter): LLaMA-2-7B in 16-bit stores half a MiB per token.
Reserving 4,096 tokens for each user takes 2 GiB, so 64 GiB serve 32 users. In blocks of 16, a user
with 300 tokens takes 19 blocks = 152 MiB, and the same 64 GiB serve 431.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from nanoserve.attention.kv_cache import KVCache, KVCacheSpec
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.kv_groups import KVCacheGroup, kv_cache_groups
from nanoserve.engine.sequence_room import SequenceRoom
from nanoserve.kernels.cpu.memory import map_zeros
from nanoserve.models.layers.context import LayerContext
from nanoserve.worker.recurrent_states import RecurrentStates

_GIB = 2**30


def longest_sequence(config: EngineConfig, model_config: ModelConfig, num_kv_blocks: int) -> int:
    """Return `max_model_len` for a pool of `num_kv_blocks` blocks.

    Raises `ValueError` if an explicit `max_model_len` does not fit, or if no sequence fits.
    """
    limit = model_config.max_position_embeddings
    pool_limit = SequenceRoom.of(config, model_config).longest(num_kv_blocks)
    return config.resolve_max_model_len(limit, num_kv_blocks, pool_limit)


def kv_block_bytes(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the bytes of a block over all ranks: K and V of the layers of the largest group."""
    num_layers = max(len(group.layers) for group in kv_cache_groups(config, model_config))
    per_token = model_config.kv_bytes_per_token(config.kv_cache_dtype)
    return config.block_size * per_token // model_config.num_kv_layers * num_layers


class KVCacheLayout(NamedTuple):
    """The layout of a KV block on one rank."""

    spec: KVCacheSpec  # of each layer
    groups: tuple[KVCacheGroup, ...]  # of all layers of the model
    layers_here: range  # of the rank's pipeline stage
    states: RecurrentStates = RecurrentStates()  # of layers that have no K and V

    @classmethod
    def of(
        cls, config: EngineConfig, model_config: ModelConfig, context: LayerContext
    ) -> "KVCacheLayout":
        """Return a rank's layout; raise `ValueError` for a format that its backend cannot read."""
        num_kv_heads, head_dim, num_stored = model_config.kv_heads
        num_kv_heads //= context.tp.slices(num_kv_heads, "num_key_value_heads")
        spec = context.attention.kv_cache_spec(
            config.block_size,
            num_kv_heads,
            head_dim,
            getattr(torch, model_config.dtype),
            config.kv_cache_dtype,
        )
        spec, groups = replace(spec, num_stored=num_stored), kv_cache_groups(config, model_config)
        layers_here = context.pp.layers_of(model_config.num_hidden_layers)
        return cls(spec, groups, layers_here, RecurrentStates.of(config, model_config, context))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: K and V of the largest number of this rank's layers in one group."""
        return self.spec.block_bytes * max(map(len, self.group_layers()))

    def group_layers(self) -> list[list[int]]:
        """Return, for each group, its layers on this rank."""
        return [[i for i in group.layers if i in self.layers_here] for group in self.groups]


def decide_num_kv_blocks(
    config: EngineConfig, model_config: ModelConfig, block_bytes: int, memory_bytes: int
) -> int:
    """Return the number of usable blocks, without dummy block 0, of a rank with `memory_bytes`.

    An explicit number of blocks takes precedence, then an explicit amount of memory. The default is
    the number that `max_num_seqs` sequences of full length need, within a quarter of the memory and
    4 GiB.
    """
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        return _explicit_num_kv_blocks(config, block_bytes, memory_bytes)
    budget = min(4 * _GIB, memory_bytes // 4)
    return max(1, min(blocks_wanted(config, model_config), budget // block_bytes - 1))


def blocks_wanted(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the number of blocks that `max_num_seqs` sequences of full length need."""
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    return config.max_num_seqs * SequenceRoom.of(config, model_config).num_blocks(max_model_len)


def _explicit_num_kv_blocks(config: EngineConfig, block_bytes: int, memory_bytes: int) -> int:
    """Return the number of usable blocks that `num_kv_blocks` or `kv_cache_memory_bytes` specifies.

    Raises `ValueError` if the pool is larger than the memory, or holds no usable block.
    """
    requested = config.kv_cache_memory_bytes or (config.num_kv_blocks or 0) * block_bytes
    if requested > memory_bytes:
        raise ValueError(
            f"the KV pool takes {requested} bytes, but only {memory_bytes} are available: lower "
            f"num_kv_blocks or kv_cache_memory_bytes"
        )
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if requested < 2 * block_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes={requested} holds no KV block: a block takes {block_bytes} "
            f"bytes, and one more is reserved as the dummy block"
        )
    return requested // block_bytes - 1


def allocate_kv_caches(
    spec: KVCacheSpec,
    groups: Sequence[KVCacheGroup],
    layers_here: range,
    num_kv_blocks: int,
    device: torch.device,
) -> list[KVCache]:
    """Allocate the KV caches of those of `layers_here` that have K and V, zeroed, in that order.

    num_kv_blocks: the number of usable blocks; dummy block 0 is added. A block belongs to one group
    at a time, so the j-th layers of all groups share their memory.

    They are zeroed because padding rows read the dummy block. On a CPU the memory is mapped
    directly from the system, which provides a page on first use: unused parts of a large pool cost
    nothing. Large pages, where the system has them, make reading scattered blocks an eighth faster.
    """
    by_group = KVCacheLayout(spec, tuple(groups), layers_here).group_layers()
    zeros = map_zeros if device.type == "cpu" else partial(torch.zeros, device=device)
    shared = spec.allocate(max(map(len, by_group)), num_kv_blocks + 1, zeros)
    caches = {
        layer: replace(cache, group=group)
        for group, layers in enumerate(by_group)
        for layer, cache in zip(layers, shared, strict=False)
    }
    return [caches[layer] for layer in layers_here if layer in caches]


def physical_memory_bytes() -> int:
    """Return the bytes of physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
