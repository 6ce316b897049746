"""A rank among those that share layers: which part is its own, and how parts become a whole."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorParallel(NamedTuple):
    """This process's place among the ranks that share layers (Shoeybi et al. 2019, Megatron-LM).

    `group` is a `nanoserve.features.parallel.process_group.Group`, None on one device.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    def part(self, total: int, what: str) -> int:
        """`total` divided by the ranks; `ValueError` if it does not divide."""
        if total % self.size:
            raise ValueError(f"{what}={total} does not divide by tensor_parallel_size={self.size}")
        return total // self.size

    def slices(self, total: int, what: str) -> int:
        """Into how many slices `total` KV heads are cut: fewer heads than ranks are shared."""
        num_slices = min(self.size, total)
        if total % num_slices or self.size % num_slices:
            raise ValueError(
                f"{what}={total} and tensor_parallel_size={self.size}: one must divide the other"
            )
        return num_slices

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.group is not None:
            self.group.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """On rank 0 the ranks' tensors side by side along the last dimension, elsewhere None."""
        if self.group is None:
            return x
        parts = self.group.gather(x)
        return None if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> None:
        """What rank 0 has in `x`, on all ranks."""
        if self.group is not None:
            self.group.broadcast(x)
