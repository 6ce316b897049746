"""Where a checkpoint's tensor goes: what a layer tells the loader."""

from dataclasses import dataclass

from torch import Tensor


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
