"""Find the safetensors files of a checkpoint: one file, or shards with an index."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open

from nanoserve.checkpoint.config_json import describe_damage, read_json
from nanoserve.checkpoint.errors import describe_missing_weights, some
from nanoserve.checkpoint.text_part import TextWeights
from nanoserve.utils.checks import require, shown

SINGLE_FILE = "model.safetensors"  # the complete checkpoint, if it is not sharded


class OpenWeights(Protocol):
    """The methods of an open safetensors file that the loader calls: see `StateDict`."""

    def __enter__(self) -> "OpenWeights": ...

    def __exit__(self, *exc: object) -> None: ...

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors."""

    def get_slice(self, name: str) -> Any:
        """Return an object that reads parts of a tensor."""

    def get_tensor(self, name: str) -> Any:
        """Return a tensor on the CPU."""


# A folder of safetensors files, or what takes their place.
Weights = Path | OpenWeights | TextWeights


class open_weights:
    """Context manager: `safe_open`, with errors that name the file."""

    def __init__(self, file: Weights) -> None:
        self._file: Any = file
        if not isinstance(file, Path):
            return
        try:
            self._file = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(describe_damage(file, error)) from error

    def __enter__(self) -> Any:  # a `safe_open`, or other open weights
        return self._file.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)


def weight_files(source: Weights) -> Sequence[Weights]:
    """Return the safetensors files in a folder, one or several; or what takes their place."""
    if isinstance(source, TextWeights):
        return weight_files(source.source)
    if not isinstance(source, Path):
        return [source]
    return folder_files(source)


def folder_files(folder: Path) -> list[Path]:
    """Return the safetensors files in a folder; raises `ValueError` as `shard_files` does."""
    single = folder / SINGLE_FILE
    return [single] if single.is_file() else shard_files(folder)


def text_weights(source: Weights) -> TextWeights:
    """Return the text model in the checkpoint of a multimodal model; reads names only.

    Raises `ValueError` if there is none.
    """
    return TextWeights.of(source, _names(source))


def base_weights(source: Weights) -> Weights:
    """Return the weights of a model, of which a checkpoint of its layers alone has no prefix.

    In a GGUF file, all models have the same names.
    """
    is_gguf = isinstance(source, Path) and source.is_file()
    if is_gguf or "embed_tokens.weight" not in _names(source):
        return source
    return TextWeights(source, prefix="", head="lm_head.")


def _names(source: Weights) -> list[str]:
    names: list[str] = []
    for file in weight_files(source):
        with open_weights(file) as tensors:
            names += tensors.offset_keys()
    return names


INDEX = f"{SINGLE_FILE}.index.json"
# An index is untrusted, so it may only name files in its own folder: no paths, and no wildcards,
# which the Hub would take for a pattern. The file itself may be a link, as in the Hub's cache.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def shard_files(path: Path) -> list[Path]:
    """Return the files of a sharded checkpoint in `path`.

    Raises `ValueError` if there is no index, or if files that it names are absent.
    """
    index = path / INDEX
    if not index.is_file():
        raise ValueError(describe_missing_weights(path))
    files = [path / name for name in shard_names(index)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{index} names files that do not exist: {some(absent)}")
    return files


def shard_names(index: Path) -> list[str]:
    """Return the sorted names of an index's files. Raises `ValueError` for an invalid name."""
    weight_map: Any = read_json(index).get("weight_map")
    require(
        isinstance(weight_map, dict) and weight_map != {},
        f"{index} is not an index of safetensors files: weight_map={shown(weight_map)}",
    )
    for name in weight_map.values():
        is_name = isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None
        require(is_name, f"{index} names {shown(name)}, which is not a file in the same folder")
    return sorted(set(weight_map.values()))
