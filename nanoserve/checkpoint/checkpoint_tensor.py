"""`CheckpointTensor` maps a checkpoint's tensor to the parameter that it fills."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, and the parameter (or view of one) that it fills.

    A layer lists these in `checkpoint_tensors(own_name)`, so the loader does not need to know which
    checkpoint tensors make up a fused parameter, nor which slice of them this rank keeps.

    A destination may split dimensions of the stored tensor, except `dim`: the stored [experts,
    hidden, 2 x size] fills a view [experts, hidden, size, 2]. With strides of its own, such a view
    transposes what is stored.
    """

    name: str  # relative to the layer's parent, such as "q_proj.weight"
    destination: Tensor
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int = 0  # this rank keeps source.narrow(dim, start, destination.shape[dim])
    start: int = 0
