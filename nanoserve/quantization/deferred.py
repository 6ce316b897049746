"""Loading a model whose linears get no weights of their own dtype: integers are made on the way.

The model is built with weights that have a shape and no memory (torch's "meta" device). Tensor
after tensor is read from the checkpoint, whole; made integers, whole, so that a rank's part has the
scales of the whole; cut to what this rank keeps; and once a weight has all its rows, its layer puts
them into the form that it multiplies with. Memory: the result, and what one weight is made of.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.loader import expected_tensors
from nanoserve.checkpoint.misfits import tell_misfits
from nanoserve.quantization.formats.registry import open_quantized
from nanoserve.quantization.matrix import QuantizedMatrix, stack_rows
from nanoserve.quantization.plain_source import PlainSource, RandomSource
from nanoserve.quantization.source import WeightSource

Weight = Tensor | QuantizedMatrix


def deferred_weight(shape: tuple[int, ...], bits: int) -> nn.Parameter:
    """A parameter without memory; `bits` of a weight are what it will take."""
    data = torch.empty(shape, dtype=torch.int8, device="meta")
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.bits = bits
    return parameter


def load_deferred(
    model: nn.Module, path: Path, load_format: str = "auto", *, shows_progress: bool = True
) -> None:
    """As `nanoserve.checkpoint.loader.load_weights`, for a model with deferred weights."""
    method = next(module.method for module in model.modules() if hasattr(module, "method"))
    if load_format == "dummy":
        source: WeightSource = RandomSource(model, model.model.embed_tokens.weight.dtype)
    elif model.config.quantization_config:
        source = open_quantized(path, model.config.quantization_config)
    else:
        source = PlainSource(path, model.tied_tensors)
    fill(model, source, method.to_integers, shows_progress)


def check_weights(model: nn.Module, path: Path) -> None:
    """As `nanoserve.checkpoint.loader.check_weights`, for a quantised checkpoint."""
    source = open_quantized(path, model.config.quantization_config)
    _check(expected_tensors(model), source, model.tied_tensors)


def fill(
    model: nn.Module,
    source: WeightSource,
    to_integers: Callable[[Weight, bool], Weight],
    shows_progress: bool,
) -> None:
    """Fill `model` from `source`.

    What is read for a deferred weight goes through `to_integers`, with whether the checkpoint has
    it in fewer bits.

    Raises `ValueError`, before anything is read, unless the two have the same tensors.
    """
    expected = expected_tensors(model)
    _check(expected, source, model.tied_tensors)
    owners = {id(parameter): owner for owner, parameter in _deferred(model)}
    pending = _Pending()
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
    with bar:
        for name, parts in expected.items():
            parts = [part for part in parts if part.destination.numel()]
            weight = source.read(name) if parts else None
            if any(part.destination.is_meta for part in parts):
                weight = to_integers(weight, source.is_quantized(name))
            for part in parts:
                own = _slice(weight, part)
                if not part.destination.is_meta:
                    part.destination.copy_(_as_float(own))
                    _keep_head(model.lm_head, part.destination, own)
                elif pending.add(part.destination, own):
                    parameter, whole = pending.take(part.destination)
                    owners[id(parameter)](whole)
                bar.update(part.destination.numel())
    for module in model.modules():
        if hasattr(module, "process_after_loading"):
            module.process_after_loading()


def _deferred(model: nn.Module) -> Iterator[tuple[Callable[[Weight], None], nn.Parameter]]:
    """Each weight without memory, and whom to give what takes its place."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                yield partial(module.method.fill, module, name), parameter


def _keep_head(head: nn.Module, destination: Tensor, weight: Weight) -> None:
    """An LM head whose integers the checkpoint has, its own or the embedding's, keeps these."""
    is_whole = weight.shape == head.weight.shape and isinstance(weight, QuantizedMatrix)
    if is_whole and _base(destination) is head.weight:
        head.method.fill(head, "weight", weight)


class _Pending:
    """Rows of weights that are not complete yet."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, Weight]]] = {}

    def add(self, destination: Tensor, rows: Weight) -> bool:
        """Whether the weight has all of its rows now."""
        base = _base(destination)
        found = self._rows.setdefault(id(base), [])
        found.append((destination.storage_offset() // base.shape[-1], rows))
        num_rows = base.numel() // base.shape[-1]
        return sum(each.shape[0] for _, each in found) == num_rows

    def take(self, destination: Tensor) -> tuple[Tensor, Weight]:
        base = _base(destination)
        found = sorted(self._rows.pop(id(base)), key=lambda each: each[0])
        return base, stack_rows([rows for _, rows in found])


def _base(view: Tensor) -> Tensor:
    return view if view._base is None else view._base


def _slice(weight: Weight, part: CheckpointTensor) -> Weight:
    """What this rank keeps."""
    size = part.destination.shape[part.dim]
    if weight.shape[part.dim] == size:
        return weight
    first, end = part.start, part.start + size
    if isinstance(weight, QuantizedMatrix):
        return weight.rows(first, end) if part.dim == 0 else weight.columns(first, end)
    return weight.narrow(part.dim, first, size)


def _as_float(weight: Weight) -> Tensor:
    return weight.dequantize() if isinstance(weight, QuantizedMatrix) else weight


def _check(
    expected: dict[str, list[CheckpointTensor]], source: WeightSource, tied: dict[str, str]
) -> None:
    wanted = {name: parts[0].shape for name, parts in expected.items()}
    found = source.shapes()
    if wanted != {name: found[name] for name in found.keys() - tied.keys()}:
        raise ValueError(f"the weights do not fit the model: {tell_misfits(wanted, found, tied)}")
