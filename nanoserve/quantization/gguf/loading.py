"""A GGUF file's weights as plain numbers in the parameters of a model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.quantization.gguf.source import GGUFSource
from nanoserve.quantization.matrix import QuantizedMatrix

_MAX_VALUES = 2**24  # that are float32 at a time: of an embedding, all would be gigabytes


@torch.inference_mode()
def load_dequantized(path: Path, expected: Mapping[str, list[CheckpointTensor]]) -> None:
    """Fill every destination, in its own type; `expected` is what the loader has checked.

    Memory holds one tensor beside the model, as it is stored and once more as integers.
    """
    source = GGUFSource(path)
    for name, targets in expected.items():
        values = source.read(name)
        for target in targets:
            _copy(values, target)


def _copy(values: Tensor | QuantizedMatrix, target: CheckpointTensor) -> None:
    """This rank's part of a tensor, some rows at a time."""
    destination, size = target.destination, target.destination.shape[target.dim]
    if isinstance(values, Tensor):
        destination.copy_(values.narrow(target.dim, target.start, size))
        return
    first = target.start if target.dim == 0 else 0
    step = max(1, _MAX_VALUES // values.shape[1])
    for row in range(0, len(destination), step):
        piece = destination[row : row + step]
        weight = values.rows(first + row, first + row + len(piece)).dequantize()
        piece.copy_(weight if target.dim == 0 else weight.narrow(1, target.start, size))
