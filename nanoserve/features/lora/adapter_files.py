"""The two files of an adapter: which they are, and whether they have changed."""

import os
import stat
from pathlib import Path
from typing import NamedTuple

from nanoserve.utils.checks import require, shown

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class NoAdapterError(ValueError):
    """There is no adapter in a folder, or no such folder."""


class AdapterFiles(NamedTuple):
    """The files of an adapter, as they were when they were looked at.

    stamps: of each file its device, inode, size, and times of change of its content and of all.
    Files with other stamps are another adapter.
    """

    folder: str
    stamps: tuple[tuple[int, ...], ...]

    @property
    def config(self) -> Path:
        return Path(self.folder, CONFIG)

    @property
    def tensors(self) -> Path:
        return Path(self.folder, TENSORS)

    def read_tensors(self) -> bytes:
        """Return what is in the file of tensors. Raises `ValueError` if a file has changed."""
        with self.tensors.open("rb") as file:
            content = file.read(self.stamps[1][2] + 1)  # no more, however large another one is
            found = _stamp_of(os.fstat(file.fileno()))  # of what was read
        if found != self.stamps[1] or AdapterFiles.find(self.folder).stamps != self.stamps:
            raise ValueError(f"{self.folder} has changed while it was read: load it again")
        return content

    @classmethod
    def find(cls, path: str, root: str | None = None) -> "AdapterFiles":
        """Look at the files in a folder.

        root: a folder that must contain it, and what symbolic links in it lead to. Raises
        `NoAdapterError` if there are no such files, and `ValueError` if they cannot be used.
        """
        folder = os.path.realpath(path)
        if root is not None:
            _check_inside(folder, root, path)
        if not os.path.isdir(folder):
            raise NoAdapterError(
                f"lora_path={shown(path)} is not a folder; download an adapter first, for example "
                f"with huggingface_hub.snapshot_download"
            )
        stamps = []
        for name in (CONFIG, TENSORS):
            file = os.path.join(folder, name)
            if root is not None:
                _check_inside(os.path.realpath(file), root, file)
            stamps.append(_stamp(file, folder))
        return cls(folder, tuple(stamps))


def _stamp(file: str, folder: str) -> tuple[int, ...]:
    try:
        found = os.stat(file)
    except (OSError, ValueError) as error:
        pickled = os.path.join(folder, "adapter_model.bin")
        is_pickled = file.endswith(TENSORS) and os.path.exists(pickled)
        reason = (
            "adapter_model.bin is a pickle, which can run programs: save the adapter again with "
            "safe_serialization=True"
            if is_pickled
            else f"{error}"
        )
        kind = NoAdapterError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{file} cannot be read: {reason}") from None
    require(stat.S_ISREG(found.st_mode), f"{file} is not a file")
    return _stamp_of(found)


def _stamp_of(found: os.stat_result) -> tuple[int, ...]:
    # The last one cannot be set: files that are copied may keep the other one.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_inside(path: str, root: str, given: str) -> None:
    real = os.path.realpath(root)
    is_inside = os.path.commonpath([real, path]) == real
    require(is_inside, f"{shown(given)} is not inside of {shown(root)}, which lora_root allows")
