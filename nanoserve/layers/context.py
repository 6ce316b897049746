"""What all layers of one model share, and where a checkpoint's tensors go."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.layers.ops import TorchOps


class TensorParallel(NamedTuple):
    """This process's place among the ranks that share a model (Shoeybi et al. 2019, Megatron-LM).

    `group` is a `nanoserve.worker.process_group.Group`, None on one device.
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

    def smallest(self, value: int) -> int:
        """What all ranks can agree on."""
        return value if self.group is None else self.group.smallest(value)


class LinearMethod(Protocol):
    """How a linear keeps and uses its weight: plain here; prepacked or quantised elsewhere."""

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: "LayerContext"
    ) -> None:
        """Give `layer` the parameters that the checkpoint fills."""

    def process_after_loading(self, layer: nn.Module) -> None:
        """Change the loaded weight into the form that `apply` wants."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], without bias."""


@dataclass(frozen=True)
class LayerContext:
    """Handed to every layer's constructor, so that no layer reads a global."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tp: TensorParallel = field(default_factory=TensorParallel)
    attention: AttentionBackend = field(default_factory=TorchAttention)
    ops: TorchOps = field(default_factory=TorchOps)
    linear_method: LinearMethod | None = None  # None keeps weights as the checkpoint has them

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised parameter, which the loader fills."""
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint and the (view of a) parameter that it fills.

    A layer lists these in `checkpoint_tensors(own_name)`, so the loader needs to know neither
    which checkpoint tensors a fused parameter is made of nor which slice of them this rank keeps.
    """

    name: str  # relative to the layer's parent, such as "q_proj.weight"
    destination: Tensor
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int = 0  # this rank keeps source.narrow(dim, start, destination.shape[dim])
    start: int = 0
