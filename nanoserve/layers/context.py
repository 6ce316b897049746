"""What all layers of one model share, and where a checkpoint's tensors go."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.layers.ops import TorchOps
from nanoserve.layers.tensor_parallel import TensorParallel


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
