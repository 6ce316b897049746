"""`CheckpointTensor` maps a checkpoint's tensor to the parameter that it fills."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint, and the parameter (or view of one) that it fills.

    A layer lists these in `checkpoint_tensors(own_name)`, so the loader does not need to know which
    checkpoint tensors make up a fused parameter, nor which slice of them this rank keeps.
    """

    name: str  # relative to the layer's parent, such as "q_proj.weight"
    destination: Tensor
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int = 0  # this rank keeps source.narrow(dim, start, destination.shape[dim])
    start: int = 0
    index: int | None = None  # of its matrix in a stack: `nanoserve.checkpoint.stacked_experts`
