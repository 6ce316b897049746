"""Where weights come from: a plain view of a checkpoint, whatever its files store instead.

Plain files, formats of quantised weights, and random numbers for benchmarks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.formats.fields import check_quantization_config, method_of
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.registry import FORMATS
from nanoserve.checkpoint.loader import expected_tensors, stored_tensors
from nanoserve.checkpoint.tied_tensors import check_tied
from nanoserve.checkpoint.weight_files import open_weights


class WeightSource(Protocol):
    """What a model is filled from. Threads may share it."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a plain checkpoint of this model would have, and its shape.

        Names are those of plain checkpoints, as "model.layers.0.self_attn.q_proj.weight"; what a
        format keeps in its place (packed codes, scales, zero points) is not among them.
        """

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        """The whole of one of them; a linear's weight is [out, in].

        What the file does not quantise has the dtype that it is stored in. Values that are no
        integers times a scale (FP8, NF4) are a float32 tensor, exactly what the format's own
        library computes before it rounds to the model's dtype. Raises `ValueError` for another
        name, and for contents that contradict each other.
        """

    def is_quantized(self, name: str) -> bool:
        """Whether the file has it in fewer bits than a plain checkpoint would."""


def open_quantized(path: Path, quantization_config: Mapping[str, Any]) -> WeightSource:
    """Open the weights of the checkpoint in `path`, whose `config.json` has `quantization_config`.

    Reads headers, and tensors of some bytes that hold shapes. Raises `ValueError`, which names the
    field or the tensor, for a setting that is not implemented, for a tensor that the format does
    not have, and for one that is missing.
    """
    check_quantization_config(quantization_config)
    return FORMATS.get(method_of(quantization_config))(path, quantization_config)


class PlainSource:
    """The safetensors files of a folder; of a tied tensor that is stored, both are the same."""

    def __init__(self, path: Path, tied: dict[str, str]) -> None:
        self._stored = stored_tensors(path)
        if tied.keys() & self._stored.keys():
            check_tied(tied, {name: source.file for name, source in self._stored.items()})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        with open_weights(self._stored[name].file) as tensors:
            return tensors.get_tensor(name)

    def is_quantized(self, name: str) -> bool:
        return False


class RandomSource:
    """For `load_format="dummy"`: normal numbers of a trained model's size, norms of one."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        expected = expected_tensors(model)
        self._shapes = {name: parts[0].shape for name, parts in expected.items()}
        self._dtype, self._generator = dtype, torch.Generator().manual_seed(0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        if "norm" in name:
            return torch.ones(self._shapes[name], dtype=self._dtype)
        weight = torch.empty(self._shapes[name], dtype=self._dtype)
        return weight.normal_(std=0.02, generator=self._generator)

    def is_quantized(self, name: str) -> bool:
        return False
