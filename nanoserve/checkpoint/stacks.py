"""Stacks: one stored tensor has a matrix for each expert.

Such a tensor is [matrices, inputs, outputs]. Its destination is a view of a parameter [matrices,
outputs, inputs], see `CheckpointTensor`. Quantization needs rows: this module returns them in the
order in which the parameter has them.
"""

import torch
from torch import Tensor

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix


def is_stack(part: CheckpointTensor) -> bool:
    return len(part.shape) == 3


def rows_of_stack(
    weight: Tensor | QuantizedMatrix, part: CheckpointTensor, num_inputs: int
) -> Tensor | QuantizedMatrix:
    """Return this rank's matrices of a stack, [matrices x outputs, num_inputs].

    weight: the stored tensor, or its rows [matrices x outputs, inputs] if it is quantized.
    """
    destination = part.destination
    first, end = part.start, part.start + destination.shape[0]
    if isinstance(weight, Tensor):
        rows = torch.empty(destination.numel(), dtype=weight.dtype)
        view = rows.as_strided(destination.shape, destination.stride())
        view.copy_(weight[first:end].reshape(destination.shape))
        return rows.view(-1, num_inputs)
    per_matrix = weight.shape[0] // part.shape[0]
    return weight.rows(first * per_matrix, end * per_matrix).reordered(_order(destination))


def memory_of_stack(destination: Tensor, num_inputs: int) -> Tensor:
    """Return the memory that a stack's destination covers, as rows [.., num_inputs]."""
    shape = (destination.numel() // num_inputs, num_inputs)
    return destination.as_strided(shape, (num_inputs, 1))


def _order(destination: Tensor) -> Tensor:
    """Return which of the stored rows is the first in memory, the second, and so on.

    The second dimension of `destination`, the inputs, is contiguous.
    """
    places = torch.zeros((), dtype=torch.int64)
    sizes_and_strides = list(zip(destination.shape, destination.stride(), strict=True))
    del sizes_and_strides[1]
    for size, stride in sizes_and_strides:
        places = places.unsqueeze(-1) + stride * torch.arange(size)
    return places.flatten().argsort()
