"""A GGUF file's weights as plain numbers in the parameters of a model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.quantization.gguf.source import GGUFSource


@torch.inference_mode()
def load_dequantized(path: Path, expected: Mapping[str, list[CheckpointTensor]]) -> None:
    """Fill every destination, in its own type; `expected` is what the loader has checked.

    Memory holds one tensor in float32 beside the model.
    """
    source = GGUFSource(path)
    for name, targets in expected.items():
        values = source.read(name)
        weight = values if isinstance(values, Tensor) else values.dequantize()
        for target in targets:
            size = target.destination.shape[target.dim]
            target.destination.copy_(weight.narrow(target.dim, target.start, size))
