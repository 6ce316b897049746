"""The host pool is memory outside the KV cache, for blocks that leave it and come back.

It has *places*, each as large as a KV block over all layers. What a place holds is one piece of
memory, so that it can be written to a file or sent in one call:

    place 0 | layer 0: K V (scales) | layer 1: K V (scales) | ...
    place 1 | ...

With several ranks, each has a pool for its share of the blocks. For a KV connector these are one
memory, which all ranks map: a place has the shares of rank 0, rank 1, ...
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention.kv_cache import KVCache
from nanoserve.attention.recurrent_state import LayerCache
from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.kv_transfers import KVTransfers
from nanoserve.models.layers.context import LayerContext, ParallelContext
from nanoserve.worker.cpu_device import Device
from nanoserve.worker.kv_cache import kv_block_bytes

_GIB = 2**30


def num_host_places(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the number of KV blocks that `kv_offloading_size` has room for, over all ranks."""
    return int((config.kv_offloading_size or 0) * _GIB) // kv_block_bytes(config, model_config)


def num_staging_places(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the number of KV blocks that the buffer of the KV connector holds."""
    options = config.kv_connector
    size = 0 if options is None else int(options.kv_buffer_size)
    return size // kv_block_bytes(config, model_config)


class HostPool:
    """`num_places` places for the KV blocks of this rank, or of all ranks in shared memory.

    memory: uint8 [num_places, place_bytes].
    """

    def __init__(
        self,
        kv_caches: Sequence[LayerCache],
        num_places: int,
        allocate: Callable[[int], np.ndarray],
        parallel: ParallelContext | None = None,
    ) -> None:
        """Allocate the memory.

        allocate: returns uint8 memory of so many bytes; for a GPU it is page-locked, so that copies
            run beside the host.
        parallel: ranks whose shares of a block lie in one place, one after the other, and to all of
            which `allocate` returns the same memory. None: this rank alone.
        """
        tensors = list(_block_tensors(kv_caches))
        sizes = [math.prod(t.shape[1:]) * t.element_size() for t in tensors]
        share, parallel = sum(sizes), parallel or ParallelContext()
        rank = parallel.global_rank
        self.num_places, self.place_bytes = num_places, share * parallel.num_ranks
        memory = torch.from_numpy(allocate(num_places * self.place_bytes))
        self.memory = memory.view(num_places, self.place_bytes)
        own = self.memory[:, rank * share : (rank + 1) * share]
        # By tensor of the KV cache: its part of each place.
        self._parts = [
            part.view(tensor.dtype).view(num_places, *tensor.shape[1:])
            for part, tensor in zip(own.split(sizes, dim=1), tensors, strict=True)
        ]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        model_config: ModelConfig,
        kv_caches: Sequence[LayerCache],
        context: LayerContext,
        device: Device,
    ) -> "HostPool | None":
        """Return a pool with the host tier's places and, after them, those of the KV connector.

        Returns None if the engine has neither. A connector gets the shares of all ranks.
        """
        num_staging = num_staging_places(config, model_config)
        num_places = num_host_places(config, model_config) + num_staging
        if not num_places:
            return None
        parallel = context.parallel
        if not num_staging or parallel.host_memory is None:
            return cls(kv_caches, num_places, device.host_memory)
        return cls(kv_caches, num_places, parallel.host_memory, parallel)

    def copy(self, kv_caches: Sequence[LayerCache], transfers: KVTransfers) -> None:
        """Launch the copies, to the host first; they run before later work of the device."""
        for part, blocks in zip(self._parts, _block_tensors(kv_caches), strict=True):
            _copy(blocks, part, transfers.to_host)
        for part, blocks in zip(self._parts, _block_tensors(kv_caches), strict=True):
            _copy(part, blocks, transfers.to_device)


def _copy(source: Tensor, target: Tensor, pairs: Iterable[tuple[int, int]]) -> None:
    """Copy source[i] to target[j] for each pair (i, j); all j differ."""
    if source.device == target.device:
        indices = torch.tensor(pairs, dtype=torch.long).view(-1, 2)
        target[indices[:, 1]] = source[indices[:, 0]]
        return
    for i, j in pairs:  # a copy engine moves whole pieces; a gather would be a kernel
        target[j].copy_(source[i], non_blocking=True)


def _block_tensors(kv_caches: Iterable[LayerCache]) -> Iterator[Tensor]:
    """Yield the tensors [num_blocks, ...] of the KV cache, each memory once.

    Layers of several groups share their memory (`allocate_kv_caches`).
    """
    seen = set()
    for kv_cache in kv_caches:
        if not isinstance(kv_cache, KVCache) or kv_cache.values.data_ptr() in seen:
            continue
        seen.add(kv_cache.values.data_ptr())
        yield from kv_cache.values
        if kv_cache.scales is not None:
            yield from kv_cache.scales
