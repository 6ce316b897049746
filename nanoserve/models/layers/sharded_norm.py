"""RMSNorm of a vector of which every rank has a part, such as all query heads together."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.models.layers.context import LayerContext


class ShardedRMSNorm(nn.Module):
    """Layer x / sqrt(mean(x^2) + eps) * weight; the mean is that of the ranks' parts together.

    `size` is the length of the whole vector, in `num_slices` slices. With fewer slices than ranks,
    as of KV heads, several ranks have a copy of the same slice.
    """

    def __init__(self, size: int, num_slices: int, eps: float, context: LayerContext) -> None:
        super().__init__()
        self.size, self.eps, self.ops, self.tp = size, eps, context.ops, context.tp
        part = size // num_slices
        self.start = self.tp.rank * num_slices // self.tp.size * part
        self.weight = context.empty(part)

    def checkpoint_tensors(self, own_name: str) -> Iterator[CheckpointTensor]:
        yield CheckpointTensor(f"{own_name}.weight", self.weight, (self.size,), 0, self.start)


def norm_shards(norms: Sequence[ShardedRMSNorm], parts: Sequence[Tensor]) -> list[Tensor]:
    """Normalise this rank's parts of several vectors, [num_tokens, part] each.

    The ranks communicate once for all of them.
    """
    tp = norms[0].tp
    if tp.size == 1:
        return [
            norm.ops.rms_norm(x.contiguous(), norm.weight, norm.eps)
            for norm, x in zip(norms, parts, strict=True)
        ]
    # Every slice is on the same number of ranks, so the mean of the ranks' means is the mean.
    means = torch.stack([x.float().square().mean(dim=-1) for x in parts], dim=-1)
    means = tp.all_reduce(means) / tp.size  # [num_tokens, number of vectors]
    normed = []
    for norm, x, mean in zip(norms, parts, means.split(1, dim=-1), strict=True):
        scaled = x.float() * torch.rsqrt(mean + norm.eps) * norm.weight.float()
        normed.append(scaled.to(x.dtype))
    return normed
