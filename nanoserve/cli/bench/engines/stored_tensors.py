"""Read the tensors of a checkpoint in safetensors, with numpy only.

The format is eight bytes with the length of a JSON header, the header, and the tensors one after
another.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_STORED = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}


def read_tensors(checkpoint: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield the name, dtype and values of every tensor. bfloat16 values are their bits as uint16.

    Each tensor is a separate memory map of the file, so it takes no memory once it is dropped.
    """
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in _STORED:
                raise ValueError(f"{name} in {file} is stored as {entry['dtype']}, not in floats")
            start, shape = 8 + length + entry["data_offsets"][0], tuple(entry["shape"])
            stored = _STORED[entry["dtype"]]
            yield name, entry["dtype"], np.memmap(file, stored, "r", start, shape)


def as_float32(data: np.ndarray) -> np.ndarray:
    if data.dtype == np.uint16:  # bfloat16: the upper half of a float32
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
