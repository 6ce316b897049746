"""What the safetensors files of a folder hold, whatever its data type, one tensor at a time."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from nanoserve.checkpoint.shards import shard_files
from nanoserve.checkpoint.weight_files import SINGLE_FILE, open_weights


class Stored(NamedTuple):
    """A tensor in a file; `dtype` is safetensors' name of it, such as "I32"."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class StoredTensors:
    """The tensors of a checkpoint by name, from one file or from several with an index.

    Only headers are read before `read` is called. Raises `ValueError` for a folder without
    safetensors files, for a damaged one, and for a name that is in two files.
    """

    def __init__(self, path: Path) -> None:
        single = path / SINGLE_FILE
        self.headers: dict[str, Stored] = {}
        for file in [single] if single.is_file() else shard_files(path):
            with open_weights(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                    if name in self.headers:
                        told = f"{name:.99} is both in {self.headers[name].file} and in {file}"
                        raise ValueError(told)
                    tensor = tensors.get_slice(name)
                    self.headers[name] = Stored(file, tuple(tensor.get_shape()), tensor.get_dtype())

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored.

        The file is mapped anew each time, so threads share nothing, and its pages count as this
        process's memory only as long as the tensor lives.
        """
        with open_weights(self.headers[name].file) as tensors:
            return tensors.get_tensor(name)
