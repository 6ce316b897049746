"""A weight source for GGUF files, with the names and row order of a safetensors checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix, reorder_rows
from nanoserve.checkpoint.gguf.blocks import FLOATS, read_values
from nanoserve.checkpoint.gguf.container import GGUFFile, StoredTensor
from nanoserve.checkpoint.gguf.latent import K_PART, V_PART, WHOLE, LatentPair
from nanoserve.checkpoint.gguf.linear_heads import BOTH_GATES, LinearHeads
from nanoserve.checkpoint.gguf.names import ONE_ROW, ROPE_TENSORS, plain_name
from nanoserve.checkpoint.gguf.settings import Settings, form_of
from nanoserve.utils.checks import require


class _Place(NamedTuple):
    tensor: StoredTensor
    expert: int | None  # index in a tensor of all experts
    rows: Tensor | None = None  # None: all

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is not None:
            return len(self.rows), *self.tensor.shape[1:]
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def read(self) -> Tensor | QuantizedMatrix:
        data = self.tensor.data() if self.rows is None else self.tensor.data()[self.rows.numpy()]
        return read_values(self.tensor.type, data if self.expert is None else data[self.expert])


def open_gguf(path: Path, config: Mapping[str, Any]) -> "GGUFSource":
    """Open a GGUF file. `config` is not used, since the file contains all settings."""
    return GGUFSource(path)


class GGUFSource:
    """A source that reads whole tensors: block types as integers, float types as floats."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `ValueError` as `GGUFFile.open` does, and for unknown tensors."""
        self._file = GGUFFile.open(path)
        self._form, settings = form_of(self._file), Settings(self._file)
        self._num_heads = settings.size("attention.head_count")
        self._num_kv_heads = settings.size("attention.head_count_kv", self._num_heads)
        self._num_layers = settings.num_layers(self._form)[0]
        has_linear_attention = self._form.has_linear_attention
        self._linear_heads = LinearHeads.of(settings) if has_linear_attention else None
        self._places: dict[str, _Place | LatentPair] = {}
        for tensor in self._file.tensors.values():
            if tensor.name not in ROPE_TENSORS:
                self._places |= self._places_of(tensor)
        self._join_latent_halves()

    def _places_of(self, tensor: StoredTensor) -> dict[str, _Place]:
        name = plain_name(self._form, tensor.name, self._num_layers)
        architecture = self._file.settings["general.architecture"]
        problem = f"{tensor.file} has {tensor.name:.99}, which nanoserve does not support in a"
        if name is None:
            raise ValueError(f"{problem} {architecture!r} model")
        if BOTH_GATES in name and self._linear_heads is not None:
            return {
                name.replace(BOTH_GATES, gate): _Place(tensor, None, rows)
                for gate, rows in self._linear_heads.gate_rows(tensor.shape[0]).items()
            }
        if "{}" not in name:
            return {name: _Place(tensor, None)}
        num_dims = 2 if name.endswith(".bias") else 3
        require(
            len(tensor.shape) == num_dims,
            f"{tensor.file}: {tensor.name} is {list(tensor.shape)}, but experts must have "
            f"{num_dims} dimensions",
        )
        return {name.format(i): _Place(tensor, i) for i in range(tensor.shape[0])}

    def _join_latent_halves(self) -> None:
        """Give each `kv_b_proj` that is stored as two tensors one place."""
        for name in [name for name in self._places if K_PART in name]:
            keys = self._places.pop(name)
            values = self._places.pop(name.replace(K_PART, V_PART), None)
            other = self._places.get(name.replace(K_PART, WHOLE))
            pair = LatentPair.of(keys.tensor, values and values.tensor, other and other.tensor)
            self._places[name.replace(K_PART, WHOLE)] = pair

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: place.shape for name, place in self._places.items()}
        for name in [name for name in shapes if name.endswith("conv1d.weight")]:
            shapes[name] = (shapes[name][0], 1, *shapes[name][1:])
        rows = [name for name in shapes if name.endswith(ONE_ROW) and len(shapes[name]) == 1]
        return shapes | {name: (1, *shapes[name]) for name in rows}

    def is_quantized(self, name: str) -> bool:
        return self._places[name].tensor.type not in FLOATS

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        place = self._places[name]
        tensor = place.tensor
        try:
            values = place.read()
        except ValueError as error:
            raise ValueError(f"{tensor.file}: {tensor.name}: {error}") from error
        if self._linear_heads is not None and ".linear_attn." in name:
            return self._linear_heads.restore(name, values)
        if self._form.adds_one_to_norms and name.endswith("norm.weight"):
            return cast(Tensor, values).float() - 1  # only matrices can be quantized
        if name.endswith(ONE_ROW) and isinstance(values, Tensor):
            return values.view(1, -1)
        if self._form.has_permuted_heads and ".attn_q." in tensor.name:
            return _in_halves(values, self._num_heads)
        if self._form.has_permuted_heads and ".attn_k." in tensor.name:
            return _in_halves(values, self._num_kv_heads)
        return values


def _in_halves(values: Tensor | QuantizedMatrix, num_heads: int) -> Tensor | QuantizedMatrix:
    """Undo the converter's permutation: the even rows of each head, followed by the odd ones."""
    order = torch.arange(values.shape[0]).view(num_heads, -1, 2).transpose(1, 2).flatten()
    return reorder_rows(values, order)
