"""Tensor parallelism: each rank's part of a layer, and the collectives over ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorParallel(NamedTuple):
    """Rank of this process among those that split the layers (Shoeybi et al. 2019, Megatron-LM).

    `group` is a `nanoserve.features.parallel.process_group.Group`, None on one device.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def part(self, total: int, what: str) -> int:
        """Return `total` / ranks. Raises `ValueError` if this is not an integer."""
        if total % self.size:
            raise ValueError(
                f"{what}={total} must be a multiple of tensor_parallel_size={self.size}"
            )
        return total // self.size

    def slices(self, total: int, what: str) -> int:
        """Return the number of slices of `total` KV heads: fewer heads than ranks are copied."""
        num_slices = min(self.size, total)
        if total % num_slices or self.size % num_slices:
            raise ValueError(
                f"{what}={total} and tensor_parallel_size={self.size}: one must divide the other"
            )
        return num_slices

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place, and return it."""
        if self.group is not None:
            self.group.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """Join the ranks' tensors in the last dimension on rank 0. Return None on other ranks."""
        if self.group is None:
            return x
        parts = self.group.gather(x)
        return None if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> None:
        """Copy `x` of rank 0 to all ranks."""
        if self.group is not None:
            self.group.broadcast(x)
