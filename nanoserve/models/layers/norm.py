"""RMSNorm (Zhang and Sennrich 2019): scale by the root mean square; no mean, no bias."""

from collections.abc import Iterator

from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.models.layers.context import LayerContext


class RMSNorm(nn.Module):
    """Layer x / sqrt(mean(x^2) + eps) * weight, over the last dimension, of length `size`."""

    def __init__(self, size: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.eps, self.ops = eps, context.ops
        self.weight = context.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add `x` to the residual stream, and normalise the sum; return (normalised, sum)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{own_name}.weight", self.weight, tuple(self.weight.shape))
