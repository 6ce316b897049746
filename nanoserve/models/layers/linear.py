"""Linear layers that can be split over ranks, and the interface for other weight formats.

Megatron's pair: a *column-parallel* linear gives each rank a part of the outputs and needs no
communication; a *row-parallel* one gives each rank a part of the inputs, so the ranks' results are
summed. A column-parallel linear followed by a row-parallel one needs a single all-reduce.
"""

from collections.abc import Callable, Iterator, Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.models.layers.context import LayerContext, LinearMethod


class UnquantizedLinearMethod:
    def __init__(self, linear: Callable[[Tensor, Tensor], Tensor] = F.linear) -> None:
        self.linear = linear

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: LayerContext
    ) -> None:
        layer.weight = context.empty(out_features, in_features)
        self.linear = context.ops.linear

    def process_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return self.linear(x, layer.weight)


class _Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, context: LayerContext) -> None:
        super().__init__()
        self.tp = context.tp
        self.method: LinearMethod = context.linear_method or UnquantizedLinearMethod()
        self.method.create_weights(self, in_features, out_features, context)

    def process_after_loading(self) -> None:
        self.method.process_after_loading(self)

    def wrap_method(self, wrap: Callable[[LinearMethod], LinearMethod]) -> None:
        """Replace the method of a loaded layer by one that calls it."""
        self.method = wrap(self.method)


class ColumnParallelLinear(_Linear):
    """Linear y = x W^T + b with the rows of W split over ranks; [..., in] -> [..., out / size].

    `outputs` has the names and output sizes of the checkpoint tensors that are fused into one
    weight: {"gate_proj": 3072, "up_proj": 3072} is one matrix product instead of two. `num_slices`
    is the number of distinct slices of an output if it is not the number of ranks: with fewer KV
    heads than ranks, several ranks have a copy of the same head.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, int],
        context: LayerContext,
        *,
        bias: bool = False,
        num_slices: Mapping[str, int] | None = None,
    ) -> None:
        self.outputs = dict(outputs)
        self.num_slices = dict.fromkeys(outputs, context.tp.size) | dict(num_slices or {})
        for name, total in self.outputs.items():
            slices = self.num_slices[name]
            if total % slices or context.tp.size % slices:
                raise ValueError(
                    f"{name} has {total} outputs, which cannot be split into {slices} slices over "
                    f"{context.tp.size} ranks: choose another tensor_parallel_size"
                )
        self.sizes = {name: total // self.num_slices[name] for name, total in outputs.items()}
        self.in_features = in_features
        super().__init__(in_features, sum(self.sizes.values()), context)
        self.bias = context.empty(sum(self.sizes.values())) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.method.apply(self, x)
        return y if self.bias is None else y + self.bias

    def start_of(self, name: str) -> int:
        """Return the first row of an output's checkpoint tensor that this rank has."""
        return self.tp.rank * self.num_slices[name] // self.tp.size * self.sizes[name]

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        first = 0
        for name, total in self.outputs.items():
            size, start = self.sizes[name], self.start_of(name)
            rows = self.weight[first : first + size]
            yield CheckpointTensor(f"{name}.weight", rows, (total, self.in_features), 0, start)
            if self.bias is not None:
                bias = self.bias[first : first + size]
                yield CheckpointTensor(f"{name}.bias", bias, (total,), 0, start)
            first += size


class RowParallelLinear(_Linear):
    """Linear y = x W^T + b with W's columns split over ranks; [..., in / size] -> [..., out].

    Each rank's product is a partial sum, so the bias is added once, after the all-reduce.
    """

    def __init__(
        self, in_features: int, out_features: int, context: LayerContext, *, bias: bool = False
    ) -> None:
        self.shape = (out_features, in_features)
        self.part = context.tp.part(in_features, "in_features")
        super().__init__(self.part, out_features, context)
        self.bias = context.empty(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.tp.all_reduce(self.method.apply(self, x))
        return y if self.bias is None else y + self.bias

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        start = self.tp.rank * self.part
        yield CheckpointTensor(f"{own_name}.weight", self.weight, self.shape, 1, start)
        if self.bias is not None:
            yield CheckpointTensor(f"{own_name}.bias", self.bias, self.shape[:1])
