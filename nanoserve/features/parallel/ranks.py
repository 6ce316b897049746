"""The rendezvous of an engine's ranks."""

import torch
import torch.distributed as dist

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.features.parallel.pipeline_stage import join_stage
from nanoserve.features.parallel.process_group import LOOPBACK, Group, join_group
from nanoserve.models.layers.context import ParallelContext
from nanoserve.models.layers.tensor_parallel import TensorParallel


def join_ranks(
    config: EngineConfig,
    model_config: ModelConfig,
    rank: int,
    store: dist.Store,
    device: torch.device,
    groups: list[Group],
    host: str = LOOPBACK,
) -> ParallelContext:
    """Join the other ranks; return this rank's context, and append its groups to `groups`.

    The caller closes the groups.
    host: an address of this machine that the other ranks can reach.
    """

    def join(name: str, rank: int, size: int) -> Group:
        own, timeout = dist.PrefixStore(name, store), config.distributed_timeout_seconds
        group = join_group(rank, size, own, device, timeout, host, config.batch_invariant)
        groups.append(group)
        return group

    tp_size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if num_stages == 1:
        return ParallelContext(TensorParallel(rank, tp_size, join("all", rank, tp_size)))
    return join_stage(num_stages, tp_size, rank, model_config, join)
