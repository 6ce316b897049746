"""The context that all layers of one model share."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.models.layers.ops import TorchOps
from nanoserve.models.layers.pipeline_parallel import PipelineParallel
from nanoserve.models.layers.tensor_parallel import TensorParallel


class LinearMethod(Protocol):
    """The way a linear keeps and uses its weight: plain here; prepacked or quantised elsewhere."""

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: "LayerContext"
    ) -> None:
        """Give `layer` the parameters that the checkpoint fills."""

    def process_after_loading(self, layer: nn.Module) -> None:
        """Change the loaded weight into the form that `apply` wants."""

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], without bias."""


@dataclass(frozen=True)
class ParallelContext:
    """This process's place among all ranks of an engine: by default, it is the only one.

    A stage of a pipeline (`pp`) has layers of its own, which several ranks may share (`tp`).
    `world` is the group of all ranks where there are several stages.
    """

    tp: TensorParallel = field(default_factory=TensorParallel)
    pp: PipelineParallel = field(default_factory=PipelineParallel)
    world: Any = None

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all stages."""
        return self.tp.size * self.pp.num_stages

    @property
    def global_rank(self) -> int:
        """The number of this rank among all of them; those of the last stage come first.

        Rank 0, which samples, is in the last stage: so no token travels, and the scheduler plans
        while the other stages compute.
        """
        return self.tp.size * (self.pp.num_stages - 1 - self.pp.index) + self.tp.rank

    def smallest(self, value: int) -> int:
        """Return the smallest value of all ranks, on all of them."""
        group = self.tp.group if self.world is None else self.world
        return value if group is None else group.smallest(value)


@dataclass(frozen=True)
class LayerContext:
    """Handed to every layer's constructor, so that no layer reads a global."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: ParallelContext = field(default_factory=ParallelContext)
    attention: AttentionBackend = field(default_factory=TorchAttention)
    ops: TorchOps = field(default_factory=TorchOps)
    linear_method: LinearMethod | None = None  # None keeps weights as the checkpoint has them
    max_model_len: int | None = None  # what the user chose
    num_positions: int | None = None  # that occur, where fewer do than the model allows
    parts: Any = None  # the model's class, whose attributes name its parts: see Qwen3ForCausalLM

    @property
    def tp(self) -> TensorParallel:
        return self.parallel.tp

    @property
    def pp(self) -> PipelineParallel:
        return self.parallel.pp

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised parameter, which the loader fills."""
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
