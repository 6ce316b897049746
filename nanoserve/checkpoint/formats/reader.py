"""The base class of the format readers, which map stored tensors to weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoserve.checkpoint.errors import some
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix
from nanoserve.checkpoint.formats.stored import Stored, StoredTensors
from nanoserve.utils.checks import require, shown

_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")


class Reader:
    """A `WeightSource` for formats with several tensors (`parts`) per weight; a base class.

    A linear is quantized if and only if it has one of the `marks`: the stored tensors are more
    reliable than the lists of modules in the config. All `parts` (names within a module) that
    `layout` returns must be present, in the given shapes; a quantized module may have no other
    tensors except the `optional` parts and a bias.
    """

    marks: tuple[str, ...]
    parts: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Read the headers in the folder `path`, and check that each weight has all its parts."""
        self._tensors, self.config = StoredTensors(path), config
        modules = {
            name.removesuffix(f".{mark}"): None
            for name in self._tensors.headers
            for mark in self.marks
            if name.endswith(f".{mark}")
        }
        self._plain = self._plain_tensors(modules)
        self._shapes = {name: header.shape for name, header in self._plain.items()}
        for module in modules:
            self._shapes[f"{module}.weight"] = self._checked_shape(module)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def read(self, name: str) -> Tensor | QuantizedMatrix:
        if name not in self._shapes:
            raise ValueError(f"the checkpoint has no tensor {shown(name)}")
        if name in self._plain:
            return self._tensors.read(name)
        return self.weight(name.removesuffix(".weight"))

    def is_quantized(self, name: str) -> bool:
        return name not in self._plain

    def layout(self, module: str) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
        """Return the shape [out, in] of a module's weight, and the shape of each of its parts."""
        raise NotImplementedError

    def weight(self, module: str) -> Tensor | QuantizedMatrix:
        """Return the weight of a quantized module."""
        raise NotImplementedError

    def has(self, module: str, part: str) -> bool:
        return f"{module}.{part}" in self._tensors.headers

    def header(self, module: str, part: str) -> Stored:
        name = f"{module}.{part}"
        require(
            self.has(module, part), f"{name:.199} is missing, although {module:.99} is quantized"
        )
        return self._tensors.headers[name]

    def part(self, module: str, part: str) -> Tensor:
        return self._tensors.read(f"{module}.{part}")

    def check_dtype(self, module: str, part: str, *dtypes: str) -> None:
        dtype = self.header(module, part).dtype
        require(dtype in dtypes, f"{module:.99}.{part} is {dtype}, not {' or '.join(dtypes)}")

    def matrix_header(self, module: str, part: str, *dtypes: str) -> tuple[int, int]:
        """Return the shape of a part, which must be a matrix of one of these dtypes."""
        self.check_dtype(module, part, *dtypes)
        shape = self.header(module, part).shape
        is_matrix = len(shape) == 2 and 0 not in shape
        problem = f"{module:.99}.{part} has shape {shown(list(shape))}"
        require(is_matrix, f"{problem}; expected a non-empty 2-D tensor")
        return shape[0], shape[1]

    def _checked_shape(self, module: str) -> tuple[int, int]:
        shape, wanted = self.layout(module)
        known = {*wanted, *self.optional}
        extra = [part for part in self.parts if self.has(module, part) and part not in known]
        require(not extra, f"{module:.99} has {extra}, which contradict its other parts")
        for part, part_shape in wanted.items():
            found = self.header(module, part).shape
            require(
                found == part_shape,
                f"{module:.99}.{part} has shape {shown(list(found))}; expected "
                f"{list(part_shape)} for a weight of shape {list(shape)}",
            )
        return shape

    def _plain_tensors(self, modules: Mapping[str, None]) -> dict[str, Stored]:
        """Return the headers of unquantized tensors. Raises `ValueError` for unknown tensors."""
        plain, unexpected = {}, []
        for name, header in self._tensors.headers.items():
            owner = next(
                (name.removesuffix(f".{p}") for p in self.parts if name.endswith(f".{p}")), None
            )
            if owner in modules:
                continue
            parent, _, own_name = name.rpartition(".")
            is_extra = parent in modules and own_name != "bias"
            is_stray = owner is not None and own_name != "weight"
            if is_extra or is_stray or header.dtype not in _PLAIN_DTYPES:
                unexpected.append(f"{name:.199} ({header.dtype})")
            plain[name] = header
        if unexpected:
            raise ValueError(
                f"tensors unknown to quant_method={shown(self.config.get('quant_method'))}, "
                f"or whose module lacks other parts: {some(sorted(unexpected))}"
            )
        return plain
