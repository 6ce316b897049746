"""A rank among those that share a model: which part is its own, and how parts become a whole."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorParallel(NamedTuple):
    """This process's place among the ranks that share a model (Shoeybi et al. 2019, Megatron-LM).

    `group` is a `nanoserve.worker.process_group.Group`, None on one device. `stage` is a
    `nanoserve.worker.pipeline_stage.Stage` where they share some of its layers only.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    stage: Any = None

    @property
    def num_ranks(self) -> int:
        """Of all stages."""
        return self.size if self.stage is None else self.size * self.stage.num_stages

    @property
    def global_rank(self) -> int:
        """Among all of them; those of the last stage come first."""
        if self.stage is None:
            return self.rank
        return self.size * (self.stage.num_stages - 1 - self.stage.index) + self.rank

    def num_layers(self, total: int) -> int:
        """How many of the model's layers are computed here."""
        return total if self.stage is None else len(self.stage.layers)

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

    def smallest(self, value: int) -> int:
        """What all ranks can agree on."""
        group = self.group if self.stage is None else self.stage.world
        return value if group is None else group.smallest(value)
