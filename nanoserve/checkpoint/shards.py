"""Checkpoints in several files, and the index that names them."""

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"


def shard_files(path: Path) -> list[Path]:
    """The files that hold the weights in `path`, which has no single file of them.

    Raises `ValueError` if there are none, or not all of them.
    """
    index = path / INDEX
    if not index.is_file():
        pickled = sorted(file.name for file in path.glob("*.bin"))
        advice = f"; {pickled} are pickles, which may run code: save them anew with transformers"
        raise ValueError(
            f"{path} is no checkpoint: it has no model.safetensors and no index of one"
            + (advice if pickled else "")
        )
    files = [path / name for name in shard_names(index)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{index} names files that are not there: {', '.join(absent)}")
    return files


def shard_names(index: Path) -> list[str]:
    """The files that an index names, in order."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(Path(name)) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error!r}") from error
