"""Read tensors of any data type from a folder's safetensors files, one at a time."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.checkpoint.text_part import TextWeights, name_in_model
from nanoserve.checkpoint.weight_files import folder_files, open_weights
from nanoserve.utils.checks import json_object, require

# safetensors' name -> torch's type, of the types that the readers use.
_TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor stored in a file; `dtype` is safetensors' name, such as "I32"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int  # of its bytes in the file
    num_bytes: int


class StoredTensors:
    """The tensors of a checkpoint by name, from a single file or from shards with an index.

    Only headers are read before `read` is called. Raises `ValueError` for a folder without
    safetensors files, for a damaged one, and for a name that is in two files.
    """

    def __init__(self, path: Path | TextWeights) -> None:
        self.headers: dict[str, Stored] = {}
        for file in folder_files(path.source if isinstance(path, TextWeights) else path):
            for own_name, header in _read_header(file).items():
                name = name_in_model(path, own_name)
                if name is None:
                    continue
                if name in self.headers:
                    first = self.headers[name].file
                    raise ValueError(f"{name:.99} is both in {first} and in {file}")
                self.headers[name] = header

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor as it is stored.

        Only its bytes are read. A mixture of experts has a hundred thousand tensors, and mapping
        the file for each of them would parse the long header each time.
        """
        header = self.headers[name]
        octets = torch.empty(header.num_bytes, dtype=torch.uint8)
        with header.file.open("rb") as file:
            file.seek(header.start)
            num_read = file.readinto(memoryview(octets.numpy().data))
        require(num_read == header.num_bytes, f"{header.file} was truncated after it was opened")
        return octets.view(_TORCH[header.dtype]).view(header.shape)


def _read_header(file: Path) -> dict[str, Stored]:
    """Read a file's header: its length (8 bytes, little-endian), followed by a JSON object."""
    with open_weights(file):
        pass  # safetensors validates lengths, types and offsets
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        entries = json_object(content.read(length), f"the header of {file}")
    headers = {}
    for name, entry in entries.items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            headers[name] = Stored(file, shape, entry["dtype"], 8 + length + first, end - first)
    return headers
