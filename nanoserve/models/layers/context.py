"""The context that all layers of a model share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.pipeline_parallel import PipelineParallel
from nanoserve.models.layers.routed_experts import RoutedExperts
from nanoserve.models.layers.tensor_parallel import TensorParallel


class LinearMethod(Protocol):
    """Storage and use of a linear's weight: plain here; prepacked or quantized elsewhere."""

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: "LayerContext"
    ) -> None:
        """Create the parameters of `layer` that the checkpoint fills."""

    def process_after_loading(self, layer: nn.Module) -> None:
        """Convert the loaded weight to the form that `apply` uses."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the matrix product without bias: [..., in_features] -> [..., out_features]."""


@dataclass(frozen=True)
class ParallelContext:
    """The rank of this process among all ranks of an engine. By default it is the only rank.

    A pipeline stage (`pp`) has its own layers, which several ranks may split (`tp`). `world` is the
    group of all ranks if there are several stages. `host_memory` returns uint8 memory of so many
    bytes, the same on all ranks; None with one rank, and with ranks on several machines.
    """

    tp: TensorParallel = field(default_factory=TensorParallel)
    pp: PipelineParallel = field(default_factory=PipelineParallel)
    world: Any = None
    host_memory: Callable[[int], np.ndarray] | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.tp.size * self.pp.num_stages

    @property
    def global_rank(self) -> int:
        """Number of this rank among all ranks. The ranks of the last stage come first.

        Rank 0, which samples, is in the last stage, so sampled tokens need not be sent, and the
        scheduler plans while the other stages compute.
        """
        return self.tp.size * (self.pp.num_stages - 1 - self.pp.index) + self.tp.rank

    def smallest(self, value: int) -> int:
        """Return, on all ranks, the smallest value of any rank."""
        group = self.tp.group if self.world is None else self.world
        return value if group is None else group.smallest(value)


@dataclass(frozen=True)
class LayerContext:
    """Context passed to every layer's constructor, so that no layer reads a global."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: ParallelContext = field(default_factory=ParallelContext)
    attention: AttentionBackend = field(default_factory=TorchAttention)
    ops: TorchOps = field(default_factory=TorchOps)
    linear_method: LinearMethod | None = None  # None keeps weights as the checkpoint has them
    max_model_len: int | None = None  # as configured by the user
    num_positions: int | None = None  # if fewer occur than the model allows
    parts: Any = None  # the model's class, with the classes of its parts: see Qwen3ForCausalLM
    routed_experts: RoutedExperts | None = None  # where layers record their experts, if at all
    adapters: Any = None  # `nanoserve.models.layers.low_rank.Adapters`, if there may be any

    @property
    def tp(self) -> TensorParallel:
        return self.parallel.tp

    @property
    def pp(self) -> PipelineParallel:
        return self.parallel.pp

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """Return an uninitialised parameter, which the loader fills."""
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
