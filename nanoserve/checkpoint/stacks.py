"""Stacks: one stored tensor has the weights of all experts of a layer.

Most checkpoints have tensors for each expert, which a layer lists in `checkpoint_tensors`. The
stacks that a checkpoint may have instead are listed in `stacked_tensors`: [experts, outputs,
inputs] or, in gpt-oss, [experts, inputs, outputs]. The destination of a stack is a view of a
parameter [experts, outputs, inputs], see `CheckpointTensor`. Quantization needs rows: this module
returns them in the order in which the parameter has them.
"""

import re
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix

_OF_AN_EXPERT = re.compile(r"(.+)\.\d+\.\w+\.\w+")  # "...experts.7.up_proj.weight"


def tensors_of(layer: Any, path: str, stored: Container[str]) -> dict[str, CheckpointTensor]:
    """Return the tensors of a layer by their full names.

    path: the layer's name in the model. stored: the names in the checkpoint; if it has any of the
    layer's stacks, these take the place of the tensors of single experts.
    """
    tensors, stacks = _by_name(layer, "checkpoint_tensors", path), stacks_of(layer, path)
    if not any(name in stored for name in stacks):
        return tensors
    experts = {name.rpartition(".")[0] for name in stacks}
    matches = {name: _OF_AN_EXPERT.fullmatch(name) for name in tensors}
    singles = {name for name, match in matches.items() if match and match[1] in experts}
    return {name: tensor for name, tensor in tensors.items() if name not in singles} | stacks


def stacks_of(layer: Any, path: str) -> dict[str, CheckpointTensor]:
    """Return the stacks that a checkpoint may have, by their full names."""
    return _by_name(layer, "stacked_tensors", path) if hasattr(layer, "stacked_tensors") else {}


def _by_name(layer: Any, method: str, path: str) -> dict[str, CheckpointTensor]:
    parent, _, own_name = path.rpartition(".")
    start = f"{parent}." if parent else ""
    return {start + tensor.name: tensor for tensor in getattr(layer, method)(own_name)}


def is_stack(part: CheckpointTensor) -> bool:
    return len(part.shape) == 3


def rows_of_matrix(
    weight: Tensor | QuantizedMatrix, part: CheckpointTensor, index: int, num_inputs: int
) -> Tensor | QuantizedMatrix:
    """Return a matrix of this rank's part of a stack, [outputs, num_inputs].

    weight: the stored tensor, or its rows [matrices x outputs, inputs] if it is quantized.
    """
    destination, index_there = part.destination[index], part.start + index
    if isinstance(weight, Tensor):
        rows = torch.empty(destination.numel(), dtype=weight.dtype)
        view = rows.as_strided(destination.shape, destination.stride())
        view.copy_(weight[index_there].reshape(destination.shape))
        return rows.view(-1, num_inputs)
    outputs = weight.shape[0] // part.shape[0]
    rows_there = weight.rows(index_there * outputs, (index_there + 1) * outputs)
    return rows_there.reordered(_order(destination))


def memory_of_matrix(part: CheckpointTensor, index: int, num_inputs: int) -> Tensor:
    """Return the memory of a matrix of a stack's destination, as rows [outputs, num_inputs]."""
    destination = part.destination[index]
    shape = (destination.numel() // num_inputs, num_inputs)
    return destination.as_strided(shape, (num_inputs, 1))


def _order(destination: Tensor) -> Tensor:
    """Return which of the stored rows is the first in memory, the second, and so on.

    One dimension of `destination` is contiguous, the inputs; the others are the outputs.
    """
    outputs = list(zip(destination.shape, destination.stride(), strict=True))
    del outputs[destination.stride().index(1)]
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in outputs:
        places = places.unsqueeze(-1) + stride * torch.arange(size)
    return places.flatten().argsort()
