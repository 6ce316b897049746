"""Reads an adapter: checks it against the model, and returns its matrices."""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from nanoserve.features.lora.adapter_config import MOST_BYTES, AdapterConfig
from nanoserve.features.lora.adapter_files import CONFIG, TENSORS, AdapterFiles
from nanoserve.features.lora.stored_header import tensors_of
from nanoserve.features.lora.tensor_names import Shapes, TensorNames
from nanoserve.utils.checks import require

_FLOATS = ("F32", "F16", "BF16")


class Limits(NamedTuple):
    """The model's matrices that an adapter may change, (outputs, inputs) by name, and limits."""

    shapes: Shapes
    max_rank: int
    dtype: torch.dtype


class Adapter(NamedTuple):
    """An adapter in the host's memory.

    content: SHA-256 of the products' operands: what K and V depend on. weights: by the name of a
    matrix A [rank, inputs] and, transposed and with its scaling, B [rank, outputs].
    """

    content: str
    weights: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for pair in self.weights.values() for x in pair)


class Outline(NamedTuple):
    """An adapter that has been checked, as far as that needs no tensor."""

    files: AdapterFiles
    config: AdapterConfig
    names: TensorNames


def outline_of(files: AdapterFiles, limits: Limits) -> Outline:
    """Check an adapter's config, and names, shapes and types of its tensors.

    Raises `ValueError`, which names the file and the tensor, for everything that is unsupported.
    """
    size = files.stamps[0][2]
    require(size <= MOST_BYTES, f"{files.config} has {size} bytes, more than {MOST_BYTES}")
    config = AdapterConfig.of(_read(files), f"{files.folder}: {CONFIG}")
    where = f"{files.folder}: {TENSORS}"
    names = TensorNames(where, config, limits.shapes, limits.max_rank)
    for name, kind, shape in tensors_of(files.tensors):
        require(kind in _FLOATS, f"{where}: {name} has type {kind}; it must be in {_FLOATS}")
        names.add(name, shape)
    names.check_complete()
    return Outline(files, config, names)


def read_adapter(outline: Outline, limits: Limits) -> Adapter:
    """Read the tensors. Raises `ValueError` for NaN and infinity, and if the files have changed."""
    digest, weights, files = hashlib.sha256(), {}, outline.files
    stored = _read_tensors(files)
    for target, (a_name, b_name, rows) in sorted(outline.names.pairs()):
        pair = []
        for name in (a_name, b_name):
            tensor = stored[name].float()
            is_finite = bool(tensor.isfinite().all())
            require(is_finite, f"{files.folder}: {TENSORS}: {name} contains NaN or infinity")
            pair.append(tensor)
        a, b = pair
        b = b[rows] * outline.config.scaling_of(outline.names.module_of(a_name))
        weights[target] = (
            a.to(limits.dtype, copy=True).contiguous(),  # targets of a fused module have the same A
            b.T.to(limits.dtype).contiguous(),
        )
        for x in weights[target]:
            is_finite = bool(x.isfinite().all())
            require(is_finite, f"{files.folder}: {a_name} has no finite scaled product")
            digest.update(repr((target, tuple(x.shape))).encode())
            digest.update(x.view(torch.uint8).numpy().data)
    return Adapter(digest.hexdigest(), weights)


def _read_tensors(files: AdapterFiles) -> dict[str, Tensor]:
    """Return the tensors of a file that is as it was when it was checked.

    The file is copied, not mapped: reading a mapped file that another program shortens meanwhile,
    as `cp` does with a file that it overwrites, ends the process with SIGBUS.
    """
    try:
        return load(files.read_tensors())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{files.tensors} cannot be read: {error}") from None


def _read(files: AdapterFiles) -> bytes:
    try:
        return files.config.read_bytes()
    except OSError as error:
        raise ValueError(f"{files.config} cannot be read: {error}") from None
