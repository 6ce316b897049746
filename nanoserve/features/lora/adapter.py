"""Reads an adapter: checks it against the model, and returns its matrices."""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from nanoserve.features.lora.adapter_config import MOST_BYTES, AdapterConfig
from nanoserve.features.lora.adapter_files import CONFIG, TENSORS, AdapterFiles
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
    with _opened(files) as stored:
        for name in stored.keys():  # noqa: SIM118 - not a dictionary
            part = stored.get_slice(name)
            kind = part.get_dtype()
            require(kind in _FLOATS, f"{where}: {name} has type {kind}; it must be in {_FLOATS}")
            names.add(name, tuple(part.get_shape()))
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
        weights[target] = a.to(limits.dtype).contiguous(), b.T.to(limits.dtype).contiguous()
        for x in weights[target]:
            is_finite = bool(x.isfinite().all())
            require(is_finite, f"{files.folder}: {a_name} has no finite scaled product")
            digest.update(repr((target, tuple(x.shape))).encode())
            digest.update(x.view(torch.uint8).numpy().data)
    return Adapter(digest.hexdigest(), weights)


def _read_tensors(files: AdapterFiles) -> dict[str, Tensor]:
    """Return the tensors of files that are as they were when they were checked.

    The file is copied, not mapped: reading a mapped file that another program shortens meanwhile,
    as `cp` does with a file that it overwrites, ends the process with SIGBUS.
    """
    size = files.stamps[1][2]
    try:
        with files.tensors.open("rb") as file:
            content = file.read(size + 1)
    except OSError as error:
        raise ValueError(f"{files.tensors} cannot be read: {error}") from None
    if AdapterFiles.find(files.folder).stamps != files.stamps:
        raise ValueError(f"{files.folder} has changed while it was read: load it again")
    return load(content)


def _read(files: AdapterFiles) -> bytes:
    try:
        return files.config.read_bytes()
    except OSError as error:
        raise ValueError(f"{files.config} cannot be read: {error}") from None


class _opened:
    """Opens the tensors of an adapter; errors of the file are `ValueError`."""

    def __init__(self, files: AdapterFiles) -> None:
        self._path = files.tensors

    def __enter__(self) -> safe_open:
        try:
            self._stored = safe_open(str(self._path), "pt")
            return self._stored.__enter__()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self._path} is not a safetensors file: {error}") from None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stored.__exit__(None, None, None)
        if isinstance(error, SafetensorError):
            raise ValueError(f"{self._path} cannot be read: {error}") from None
