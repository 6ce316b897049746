"""The context that all layers of one model share."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.torch import TorchAttention
from nanoserve.layers.ops import TorchOps
from nanoserve.layers.tensor_parallel import TensorParallel


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
class LayerContext:
    """Handed to every layer's constructor, so that no layer reads a global."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tp: TensorParallel = field(default_factory=TensorParallel)
    attention: AttentionBackend = field(default_factory=TorchAttention)
    ops: TorchOps = field(default_factory=TorchOps)
    linear_method: LinearMethod | None = None  # None keeps weights as the checkpoint has them
    max_model_len: int | None = None  # what the user chose
    num_positions: int | None = None  # that occur, where fewer do than the model allows
    parts: Any = None  # the model's class, whose attributes name its parts: see Qwen3ForCausalLM

    def of_layer(self, index: int) -> "LayerContext":
        """Return the context of one layer: without memory, if another pipeline stage has it."""
        stage = self.tp.stage
        if stage is None or index in stage.layers:
            return self
        return replace(self, device=torch.device("meta"))

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """An uninitialised parameter, which the loader fills."""
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
