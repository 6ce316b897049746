"""Load models whose linear weights are quantized in the file or during loading.

The model is built with weights that have a shape but no memory (torch's "meta" device). Each tensor
is read from the checkpoint and quantized as a whole, so that a rank's slice has the scales of the
whole tensor, and then cut to this rank's slice. Once a weight has all its rows, its layer converts
it to the form that it multiplies with. Peak memory: the result, plus the temporary tensors of one
weight.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.errors import describe_mismatches
from nanoserve.checkpoint.formats.quantized_matrix import QuantizedMatrix, stack_rows
from nanoserve.checkpoint.formats.source import (
    PlainSource,
    RandomSource,
    WeightSource,
    open_quantized,
)
from nanoserve.checkpoint.loader import expected_tensors, unused_tensors
from nanoserve.checkpoint.stacks import is_stack, memory_of_matrix, rows_of_matrix
from nanoserve.checkpoint.weight_files import Weights
from nanoserve.kernels.cpu.memory import give_back_freed

Weight = Tensor | QuantizedMatrix
_MAX_VALUES = 2**24  # values dequantized at a time: a whole embedding would take gigabytes


def deferred_weight(shape: tuple[int, ...], bits: int) -> nn.Parameter:
    """Return a parameter without memory; its attribute `bits` is the future size of a weight."""
    data = torch.empty(shape, dtype=torch.int8, device="meta")
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.bits = bits  # type: ignore[attr-defined]
    return parameter


def load_deferred(
    model: nn.Module,
    path: Weights,
    load_format: str = "auto",
    elsewhere: Set[str] = frozenset(),
    *,
    shows_progress: bool = True,
) -> None:
    """Load a model with deferred weights, like `nanoserve.checkpoint.loader.load_weights`."""
    if load_format == "dummy":
        source: WeightSource = RandomSource(model, getattr(torch, model.config.dtype))
    elif model.config.quantization_config:
        source = open_quantized(path, model.config.quantization_config)
    else:
        source = PlainSource(path, model.tied_tensors)
    methods = (getattr(module, "method", None) for module in model.modules())
    found = (getattr(method, "to_integers", None) for method in methods)
    to_integers = next((function for function in found if function is not None), None)
    fill(model, source, to_integers, shows_progress, elsewhere)


def check_weights(model: nn.Module, path: Weights, elsewhere: Set[str] = frozenset()) -> None:
    """Check a quantized checkpoint, like `nanoserve.checkpoint.loader.check_weights`."""
    source = open_quantized(path, model.config.quantization_config)
    _check(expected_tensors(model, source.shapes()), source, model, elsewhere)


def fill(
    model: nn.Module,
    source: WeightSource,
    to_integers: Callable[[Weight, bool], Weight] | None,
    shows_progress: bool,
    elsewhere: Set[str] = frozenset(),
) -> None:
    """Fill `model` from `source`.

    Tensors for a deferred weight are passed to `to_integers`, with True if the checkpoint stores
    them quantized. For other parameters, quantized tensors are converted to the parameter's dtype.

    Raises `ValueError`, before anything is read, unless model and source have the same tensors.
    """
    expected = expected_tensors(model, source.shapes())
    _check(expected, source, model, elsewhere)
    unused_tensors(model, source.shapes(), says_so=shows_progress)
    pending = {
        _memory(parameter): _Pending(set_weight, num_rows, parameter.shape[-1])
        for set_weight, num_rows, parameter in _deferred(model)
    }
    size = sum(part.destination.numel() for parts in expected.values() for part in parts)
    bar = tqdm(
        desc="Loading weights",
        total=size,
        unit=" weights",
        unit_scale=True,
        delay=1,
        dynamic_ncols=True,
        disable=not shows_progress,
    )
    num_since = 0
    weight: Any
    with bar:
        for name, parts in expected.items():
            parts = [part for part in parts if part.destination.numel()]
            num_values = sum(part.destination.numel() for part in parts)
            num_since += num_values
            if num_since > _MAX_VALUES:
                # Free the tensors of earlier weights, the last one's included, before this weight's
                # temporary tensors are allocated: the peak then has the temporary tensors of one
                # weight only.
                weight = own = None
                give_back_freed()
                num_since = num_values
            weight = source.read(name) if parts else None
            is_stored_quantized = source.is_quantized(name)
            are_stacks = any(is_stack(part) for part in parts)
            if not are_stacks and any(part.destination.is_meta for part in parts):
                weight = to_integers(weight, is_stored_quantized)
            for part in parts:
                if are_stacks:
                    _fill_stack(weight, part, is_stored_quantized, to_integers, pending)
                    continue
                own = _slice(weight, part)
                if not part.destination.is_meta:
                    _copy(own, part.destination)
                    _fill_head(model.lm_head, part.destination, own, to_integers)
                else:
                    pending[_memory(part.destination)].add(part.destination, own)
            bar.update(num_values)
    for module in model.modules():
        if hasattr(module, "process_after_loading"):
            module.process_after_loading()
    give_back_freed()


def _deferred(
    model: nn.Module,
) -> Iterator[tuple[Callable[[Weight], None], int, nn.Parameter]]:
    """Yield (function that sets the weight, number of rows, parameter) of each deferred weight."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                num_rows = parameter.numel() // parameter.shape[-1]
                yield partial(module.method.fill, module, name), num_rows, parameter


def _memory(tensor: Tensor) -> int:
    """Return an id of a tensor's storage, shared by its views, also on the "meta" device."""
    return tensor.untyped_storage()._cdata


def _fill_head(
    head: nn.Module | None,
    destination: Tensor,
    weight: Weight,
    to_integers: Callable[[Weight, bool], Weight] | None,
) -> None:
    """Set the form of an LM head as soon as its weight, or the tied embedding's, has been read.

    The embedding is read first, so that the temporary tensors of the largest weight do not add to
    the memory of all others. Integers of the checkpoint are kept.
    """
    if head is None or not hasattr(head.method, "fill"):
        return
    if _memory(destination) != _memory(head.weight):
        return
    if isinstance(weight, QuantizedMatrix) and weight.shape == head.weight.shape:
        head.method.fill(head, "weight", weight)
    elif to_integers is not None:
        head.method.fill(head, "weight", to_integers(head.weight.data, False))


class _Pending:
    """A deferred weight, some rows of which have been read."""

    def __init__(self, fill: Callable[[Weight], None], num_rows: int, num_inputs: int) -> None:
        self._fill, self._num_missing, self.num_inputs = fill, num_rows, num_inputs
        self._found: list[tuple[int, Weight]] = []

    def add(self, destination: Tensor, rows: Weight) -> None:
        self._found.append((int(destination.storage_offset()), rows))
        self._num_missing -= rows.shape[0]
        if self._num_missing == 0:
            found = [rows for _, rows in sorted(self._found, key=lambda each: each[0])]
            self._found.clear()
            self._fill(stack_rows(found))


def _fill_stack(
    weight: Weight,
    part: CheckpointTensor,
    is_quantized: bool,
    to_integers: Callable[[Weight, bool], Weight] | None,
    pending: Mapping[int, _Pending],
) -> None:
    """Set this rank's matrices of a stack, one by one: temporary tensors are of a matrix only."""
    destination = part.destination
    if isinstance(weight, Tensor) and not destination.is_meta:
        _copy(_slice(weight, part), destination)
        return
    for i in range(len(destination)):
        if destination.is_meta and to_integers is not None:
            weights = pending[_memory(destination)]
            rows = rows_of_matrix(weight, part, i, weights.num_inputs)
            weights.add(destination[i], to_integers(rows, is_quantized))
        else:
            num_inputs = weight.shape[1]
            rows = rows_of_matrix(weight, part, i, num_inputs)
            _copy(rows, memory_of_matrix(part, i, num_inputs))


def _slice(weight: Weight, part: CheckpointTensor) -> Weight:
    """Return this rank's slice of a weight."""
    size = part.destination.shape[part.dim]
    if weight.shape[part.dim] == size:
        return weight
    first, end = part.start, part.start + size
    if isinstance(weight, QuantizedMatrix):
        return weight.rows(first, end) if part.dim == 0 else weight.columns(first, end)
    return weight.narrow(part.dim, first, size)


def _copy(weight: Weight, destination: Tensor) -> None:
    """Copy a weight into `destination`; a quantized one is dequantized, some rows at a time."""
    if isinstance(weight, Tensor):
        destination.copy_(weight.reshape(destination.shape))
        return
    step = max(1, _MAX_VALUES // weight.shape[1])
    for row in range(0, len(destination), step):
        piece = destination[row : row + step]
        piece.copy_(weight.rows(row, row + len(piece)).dequantize())


def _check(
    expected: dict[str, list[CheckpointTensor]],
    source: WeightSource,
    model: nn.Module,
    elsewhere: Set[str],
) -> None:
    wanted = {name: parts[0].shape for name, parts in expected.items()}
    found = source.shapes()
    others = model.tied_tensors.keys() | elsewhere | unused_tensors(model, found)
    if wanted != {name: found[name] for name in found.keys() - others}:
        mismatches = describe_mismatches(wanted, found, others)
        raise ValueError(f"the weights do not match the model: {mismatches}")
