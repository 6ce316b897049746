"""A state dictionary takes the place of the files of a checkpoint.

The loader reads it in memory as it reads a safetensors file. Processes that do not share this
memory read the files that `write_files` makes of it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoserve.checkpoint.weight_files import SINGLE_FILE
from nanoserve.utils.checks import require, shown

_SHARD = 2**30  # bytes of a file: what is copied at a time
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}  # as in a safetensors file


class StateDict:
    """Tensors by name, with the methods of an open safetensors file that the loader calls.

    No tensor is copied or changed. Raises `ValueError` as `checked_pairs` does.
    """

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = dict(checked_pairs(pairs))

    def __str__(self) -> str:
        return "the given state dictionary"

    def __enter__(self) -> "StateDict":
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: the tensors belong to the caller."""

    def offset_keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name].cpu()


class _Slice:
    """A tensor that is read in part."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_dtype(self) -> str:
        return _NAMES[self._tensor.dtype]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part]


def checked_pairs(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor without gradients).

    Raises `ValueError` for what is no pair of a name and a dense tensor of floats, and for a name
    that comes twice.
    """
    names: set[str] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"{shown(pair)} is not a pair (name, tensor)")
        name, tensor = pair
        what = f"{name:.99} is"
        require(isinstance(tensor, Tensor), f"{what} {type(tensor).__name__}, not a torch.Tensor")
        require(name not in names, f"{name:.99} is given twice")
        require(
            not hasattr(tensor, "full_tensor"),
            f"{what} a shard of a DTensor; pass its full_tensor()",
        )
        require(
            tensor.dtype in _NAMES and tensor.layout is torch.strided and not tensor.is_meta,
            f"{what} a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}; weights are "
            f"dense tensors of {', '.join(map(str, _NAMES))} that have values",
        )
        names.add(name)
        yield name, tensor.detach()


def named_tensors(source: Any) -> Iterable[tuple[str, Tensor]]:
    """Return the pairs of a mapping, of a module or of an iterable of pairs.

    Raises `ValueError` for anything else.
    """
    if isinstance(source, torch.nn.Module):
        source = source.state_dict()
    if isinstance(source, Mapping):
        return source.items()
    if not isinstance(source, Iterable) or isinstance(source, (str, bytes, Tensor)):
        raise ValueError(
            f"source={shown(source)} is neither a folder nor a mapping of names to tensors, nor an "
            f"iterable of (name, tensor), nor a torch.nn.Module"
        )
    return source


def write_files(pairs: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write tensors into `folder` as a sharded checkpoint, one shard at a time.

    Memory holds a copy of one shard. Raises `ValueError` as `checked_pairs` does.
    """
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    num_shards = num_bytes = 0

    def write() -> None:
        file = f"model-{num_shards:05}.safetensors"
        save_file(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in checked_pairs(pairs):
        # A copy: tied tensors share memory, which safetensors rejects.
        shard[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        num_bytes += tensor.nbytes
        if num_bytes >= _SHARD:
            write()
            num_shards, num_bytes = num_shards + 1, 0
    if shard:
        write()
    require(bool(weight_map), "the source has no tensors")
    index = folder / f"{SINGLE_FILE}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
