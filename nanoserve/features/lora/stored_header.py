"""Reads which tensors a file of safetensors has, by ordinary reads.

The library maps the file into memory for that. If another program shortens it at that moment, the
process ends with SIGBUS. A file begins with the length of a header, eight bytes, and the header, a
JSON object with the type, the shape and the place of each tensor; then come the tensors.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoserve.utils.checks import is_int, json_object, require

_MOST_BYTES = 10 * 2**20  # of a header; thousands of tensors take less than one
_LONGEST_NAME = 1_000  # characters of a tensor's name, which errors quote
_LONGEST_TYPE = 16


def tensors_of(path: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, type and shape of each tensor. Raises `ValueError`, which names the file.

    The places of tensors are checked as far as that the file is not shorter or longer than they.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            require(
                size > 8 and length <= min(size - 8, _MOST_BYTES),
                f"{path} is not a safetensors file: in {size} bytes, its header has {length}",
            )
            header = json_object(file.read(length), f"{path} is not a safetensors file: its header")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    header.pop("__metadata__", None)
    end = 0
    for name, entry in header.items():
        require(
            len(name) <= _LONGEST_NAME,
            f"{path} has a tensor whose name has {len(name)} characters, more than {_LONGEST_NAME}",
        )
        kind, shape, places = _parts_of(entry)
        require(shape is not None, f"{path} is not a safetensors file: {name} has no type or shape")
        end = max(end, places[1])
        yield name, kind, shape
    require(
        8 + length + end == size,
        f"{path} is not a safetensors file: it has {size} bytes instead of {8 + length + end}",
    )


def _parts_of(entry: Any) -> tuple[str, tuple[int, ...] | None, list[int]]:
    """Return type, shape and place of a tensor; None for the shape of what describes none."""
    if not isinstance(entry, dict):
        return "", None, []
    kind, shape, places = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    are_numbers = all(
        isinstance(numbers, list) and all(is_int(one) and one >= 0 for one in numbers)
        for numbers in (shape, places)
    )
    is_type = isinstance(kind, str) and len(kind) <= _LONGEST_TYPE
    if not (is_type and are_numbers and len(places) == 2):
        return "", None, []
    return kind, tuple(shape), places
