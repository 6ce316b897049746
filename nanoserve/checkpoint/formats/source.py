"""Weight sources show any checkpoint format with the names and shapes of the unquantized model.

There are sources for unquantized files, quantized formats, and random numbers for benchmarks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.formats.fields import check_quantization_config, method_of
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.registry import FORMATS
from nanoserve.checkpoint.loader import check_tied, expected_tensors, stored_tensors
from nanoserve.checkpoint.text_part import TextWeights
from nanoserve.checkpoint.weight_files import Weights, open_weights
from nanoserve.utils.checks import require


class WeightSource(Protocol):
    """The source of a model's weights. Threads may share it."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that an unquantized checkpoint would have.

        Names are as in unquantized checkpoints, such as "model.layers.0.self_attn.q_proj.weight";
        the tensors that a format stores instead (packed codes, scales, zero points) are not
        included.
        """

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        """Return a whole tensor; a linear's weight is [out, in].

        A quantized stack, [matrices, in, out], is returned as its rows, [matrices x out, in].
        A tensor that is not quantized keeps its stored dtype. Codes other than integers (FP8, NF4)
        are dequantized to float32, exactly as in the format's own library before it rounds to the
        model's dtype. Raises `ValueError` for an unknown name, and for contradictory contents.
        """

    def is_quantized(self, name: str) -> bool:
        """Return True if the checkpoint stores the tensor in quantized form."""


def open_quantized(path: Weights, quantization_config: Mapping[str, Any]) -> WeightSource:
    """Open the weights of the checkpoint in `path`, whose `config.json` has `quantization_config`.

    Reads headers, and small tensors that hold shapes. Raises `ValueError`, with the name of the
    field or tensor, for a setting that is not supported, for unknown or missing tensors, and for a
    state dictionary, which has no such format.
    """
    check_quantization_config(quantization_config)
    method = method_of(quantization_config)
    require(
        isinstance(path.source if isinstance(path, TextWeights) else path, Path),
        f"this model's checkpoint is quantized ({method}), and {path} has floats; pass a folder of "
        f"the same format",
    )
    return FORMATS.get(method)(path, quantization_config)


class PlainSource:
    """A source for unquantized safetensors files in a folder, or a state dictionary.

    Raises `ValueError` if a tied tensor is stored and differs from its twin.
    """

    def __init__(self, path: Weights, tied: dict[str, str]) -> None:
        self._stored = stored_tensors(path)
        if tied.keys() & self._stored.keys():
            check_tied(tied, self._stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        stored = self._stored[name]
        with open_weights(stored.file) as tensors:
            return tensors.get_tensor(stored.name)

    def is_quantized(self, name: str) -> bool:
        return False


class RandomSource:
    """A source of random weights (std 0.02; norms are ones), for `load_format="dummy"`."""

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
