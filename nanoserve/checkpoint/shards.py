"""Checkpoints in several files, and the index that names them."""

import re
from pathlib import Path

from nanoserve.checkpoint.config_json import read_json
from nanoserve.checkpoint.misfits import some, tell_no_weights
from nanoserve.checkpoint.weight_files import SINGLE_FILE
from nanoserve.utils.checks import require, shown

INDEX = f"{SINGLE_FILE}.index.json"
# An index may come from anyone, so it names files in its own folder and nothing else: no path, and
# nothing that the hub would take for a pattern. The file itself may be a link, as in the hub's
# cache.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def shard_files(path: Path) -> list[Path]:
    """The files that hold the weights in `path`, which has no single file of them.

    Raises `ValueError` if there are none, or not all of them.
    """
    index = path / INDEX
    if not index.is_file():
        raise ValueError(tell_no_weights(path))
    files = [path / name for name in shard_names(index)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{index} names files that are not there: {some(absent)}")
    return files


def shard_names(index: Path) -> list[str]:
    """The files that an index names, in order. Raises `ValueError` for what is no name of one."""
    weight_map = read_json(index).get("weight_map")
    require(
        isinstance(weight_map, dict) and weight_map != {},
        f"{index} is no index of safetensors files: weight_map={shown(weight_map)}",
    )
    for name in weight_map.values():
        is_name = isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None
        require(is_name, f"{index} names {shown(name)}, which is no file of its own folder")
    return sorted(set(weight_map.values()))
