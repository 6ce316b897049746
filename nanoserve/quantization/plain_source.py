"""Sources of plain weights: safetensors files, and random numbers for benchmarks."""

from pathlib import Path

import torch
from torch import Tensor, nn

from nanoserve.checkpoint.loader import expected_tensors, stored_tensors
from nanoserve.checkpoint.tied_tensors import check_tied
from nanoserve.checkpoint.weight_files import open_weights


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
