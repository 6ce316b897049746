"""Parse GGUF files: settings by name, and the position of each tensor's bytes.

The format (ggml's docs/gguf.md): a header with two counts, then the settings, each with name and
type, then the list of tensors, and, from the next aligned byte on, their data. The package `gguf`
is not used: its reader creates an array for every word of a vocabulary (151,000 tokens and as many
merges: 8 seconds and 540 MB), and does not terminate if a list claims to be longer than its file.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanoserve.utils.checks import require, shown

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_TEXT, _LIST = 8, 9
_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
# Supported types: (values in a block, bytes of a block).
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18),
    "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "MXFP4": (32, 17),
}  # fmt: skip
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_DIMS = 4


class StoredTensor(NamedTuple):
    """A tensor stored in a file: rows of blocks."""

    name: str
    type: str
    shape: tuple[int, ...]  # [out, in] as in torch; GGUF has the reverse order
    file: Path
    start: int  # offset in the file, in bytes

    def data(self) -> np.ndarray:
        """Return uint8 [*shape[:-1], bytes of a row], mapped into memory and read on access."""
        values, num_bytes = BLOCKS[self.type]
        shape = (*self.shape[:-1], self.shape[-1] // values * num_bytes)
        return np.memmap(self.file, np.uint8, mode="r", offset=self.start, shape=shape)


@dataclass(frozen=True)
class GGUFFile:
    """A model in one file or several: the settings of the first file, the tensors of all."""

    path: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, path: "Path | GGUFFile") -> "GGUFFile":
        """Read the headers of a file and of its other parts. An open file is returned unchanged.

        Raises `ValueError` for a damaged file, for an incomplete set of parts, and for a tensor of
        an unsupported type.
        """
        if isinstance(path, GGUFFile):
            return path
        settings, tensors = _Parser(path).parse()
        for part in parts_of(path.name)[1:]:
            file = path.with_name(part)
            require(file.is_file(), f"{path} is one of several files, but {part} is not next to it")
            more = _Parser(file).parse()[1]
            twice = sorted(tensors.keys() & more.keys())
            require(not twice, f"{shown(twice)} is both in {file} and in an earlier part")
            tensors |= more
        count = settings.get("split.tensors.count", len(tensors))
        require(
            count == len(tensors),
            f"{path} is part of a model with {shown(count)} tensors, but {len(tensors)} were "
            f"found: keep the original file names, such as ...-00001-of-00003.gguf",
        )
        return cls(path, settings, tensors)


def parts_of(name: str) -> list[str]:
    """Return the file names of a model, given the first. Raises `ValueError` for another part."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    stem, number, count = match[1], int(match[2]), int(match[3])
    first = f"{stem}-00001-of-{count:05}.gguf"
    require(number == 1, f"{name} is not the first file of a split GGUF; pass {first}")
    return [f"{stem}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


class _Parser:
    """A sequential parser. It never reads beyond the file, whatever counts the file claims."""

    def __init__(self, path: Path) -> None:
        require(path.is_file(), f"{path} is not a file")  # reading from a pipe would block
        self.path, self.size, self.position = path, path.stat().st_size, 0
        self._require(self.size >= 24, "is too short for a GGUF header")
        self.content = np.memmap(path, np.uint8, mode="r")

    def parse(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        self._require(bytes(self._bytes(4)) == b"GGUF", "does not begin with GGUF")
        version = self._scalar("<I")
        problem = f"has version {version}; supported are 2 and 3, in little-endian order"
        self._require(version in (2, 3), problem)
        num_tensors, num_settings = self._scalar("<Q"), self._scalar("<Q")
        settings: dict[str, Any] = {}
        for _ in range(num_settings):
            name = self._text()
            self._require(name not in settings, f"has {name:.99} twice")
            settings[name] = self._value(self._scalar("<I"))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        align = settings.get("general.alignment", 32)
        is_power = isinstance(align, int) and 0 < align <= 2**20 and align & (align - 1) == 0
        self._require(is_power, f"has general.alignment={shown(align)}, not a power of two")
        start = -(-self.position // align) * align
        tensors = {tensor.name: tensor for tensor in self._tensors(heads, start)}
        self._require(len(tensors) == num_tensors, "has two tensors with the same name")
        return settings, tensors

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._text(), self._scalar("<I")
        self._require(
            0 < num_dims <= _MAX_DIMS,
            f"has {name:.99} with {num_dims} dimensions; 1 to {_MAX_DIMS} are allowed",
        )
        shape = tuple(self._scalar("<Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _tensors(self, heads: list[tuple[Any, ...]], start: int) -> Iterator[StoredTensor]:
        for name, shape, number, offset in heads:
            kind = _TYPES.get(number, f"type {number}")
            self._require(
                kind in BLOCKS,
                f"stores {name:.99} as {kind}, which is not supported; supported are "
                f"{', '.join(BLOCKS)}: use a file of another quantization, such as Q4_K_M or "
                f"Q8_0, or create one with llama-quantize",
            )
            values, num_bytes = BLOCKS[kind]
            is_whole = min(shape) > 0 and shape[-1] % values == 0
            self._require(
                is_whole, f"has {name:.99} of shape {list(shape)}, not whole blocks of {kind}"
            )
            end = start + offset + prod(shape) // values * num_bytes
            self._require(end <= self.size, f"ends within {name:.99}: download it again")
            yield StoredTensor(name, kind, shape, self.path, start + offset)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _TEXT:
            return self._text()
        self._require(kind == _LIST, f"has a setting of the unknown type {kind}")
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind in _SCALARS:
            return np.frombuffer(
                self._bytes(count * struct.calcsize(_SCALARS[kind])), _SCALARS[kind]
            ).tolist()
        self._require(kind == _TEXT, f"has a list of the unknown type {kind}")
        self._require(8 * count <= self.size - self.position, "ends within a list")
        return [self._text() for _ in range(count)]

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _text(self) -> str:
        # Some tokens of a vocabulary are invalid UTF-8, but none that matters for tokenization.
        return bytes(self._bytes(self._scalar("<Q"))).decode(errors="replace")

    def _bytes(self, count: int) -> memoryview:
        end = self.position + count
        self._require(end <= self.size, "ends too early: download it again")
        piece, self.position = self.content[self.position : end].data, end
        return piece

    def _require(self, condition: bool, problem: str) -> None:
        require(condition, f"{self.path} {problem}")
