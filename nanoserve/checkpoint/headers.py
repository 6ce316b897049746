"""Read the size of a checkpoint's weights, by data type, from the file headers alone."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from nanoserve.checkpoint.checkpoint import Checkpoint
from nanoserve.checkpoint.gguf.container import BLOCKS, GGUFFile
from nanoserve.checkpoint.weight_files import (
    INDEX,
    SINGLE_FILE,
    open_weights,
    shard_files,
    shard_names,
)


def stored_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the bytes of the tensors of each data type, such as {"BF16": 1503264768}.

    For a model on the Hub whose weights are not in the cache, the headers are requested from the
    hub. Raises `ValueError` if there are no weights that can be read.
    """
    folder = checkpoint.folder
    if folder.is_file():
        return _of_gguf(folder)
    if checkpoint.is_from_hub and not has_weights(checkpoint):
        return _of_hub(str(checkpoint.name), folder.name)
    single = folder / SINGLE_FILE
    files = [single] if single.is_file() else shard_files(folder)
    return _sum(entry for file in files for entry in _header(file).values())


def has_weights(checkpoint: Checkpoint) -> bool:
    """Return True if the weights, all files that an index names, are on this machine."""
    folder = checkpoint.folder
    if not checkpoint.is_from_hub or folder.is_file():
        return True
    index = folder / INDEX
    names = shard_names(index) if index.is_file() else [SINGLE_FILE]
    return all((folder / name).is_file() for name in names)


def _header(file: Path) -> dict[str, Any]:
    with open_weights(file), file.open("rb") as opened:  # safe_open has validated the file
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    header.pop("__metadata__", None)
    return header


def _sum(entries: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for entry in entries:
        start, end = entry["data_offsets"]
        sizes[entry["dtype"]] += end - start
    return dict(sizes)


def _of_gguf(path: Path) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for tensor in GGUFFile.open(path).tensors.values():
        values, num_bytes = BLOCKS[tensor.type]
        sizes[tensor.type] += prod(tensor.shape) // values * num_bytes
    return dict(sizes)


def _of_hub(name: str, commit: str) -> dict[str, int]:
    from huggingface_hub import HfApi

    try:
        found = HfApi().get_safetensors_metadata(name, revision=commit)
    except Exception as error:  # from the Hub, the network or the files
        problem = f"the headers of {name}'s weights cannot be read from the Hub"
        raise ValueError(f"{problem}: {type(error).__name__}: {error!s:.300}") from error
    tensors = (t for file in found.files_metadata.values() for t in file.tensors.values())
    return _sum({"dtype": t.dtype, "data_offsets": t.data_offsets} for t in tensors)
