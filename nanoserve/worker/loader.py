"""safetensors -> parameters, strictly: nothing missing, nothing left over, every shape right.

A wrong checkpoint that loads is worse than one that does not: it answers, and it answers garbage.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanoserve.layers.context import CheckpointTensor

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")  # anything else is quantised: not just numbers


def load_weights(model: nn.Module, path: Path, load_format: str = "auto") -> None:
    """Fill the parameters of `model` from the safetensors files in `path`.

    Reads a single file or a sharded index, and of each tensor only this rank's slice. "dummy"
    fills with random values instead. Raises `ValueError` that names every offending tensor.
    """
    if load_format == "dummy":
        _fill_randomly(model)
    else:
        _load_safetensors(model, path)
    for module in model.modules():
        if hasattr(module, "process_after_loading"):
            module.process_after_loading()


def expected_tensors(model: nn.Module) -> dict[str, list[CheckpointTensor]]:
    """Every checkpoint tensor that `model` wants, by its full name, and what it fills.

    Most fill one parameter. Where a checkpoint stores several linears as one tensor, the model's
    class says so: `fused_tensors = {"gate_up_proj": ("gate_proj", "up_proj")}` means that the rows
    of gate_up_proj are those of gate_proj, then those of up_proj.
    """
    wanted = {}
    for path, module in model.named_modules():
        if not hasattr(module, "checkpoint_tensors"):
            continue
        parent, _, own_name = path.rpartition(".")
        for tensor in module.checkpoint_tensors(own_name):
            wanted[f"{parent}.{tensor.name}" if parent else tensor.name] = tensor
    expected: dict[str, list[CheckpointTensor]] = {}
    for name, tensor in _fused(wanted, getattr(model, "fused_tensors", {})):
        if name not in model.ignored_tensors:
            expected.setdefault(name, []).append(tensor)
    return expected


def _fused(
    wanted: Mapping[str, CheckpointTensor], fused_tensors: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, CheckpointTensor]]:
    """Each tensor under the name that the checkpoint has for it, with its place in the whole."""
    fused_names = {part: name for name, parts in fused_tensors.items() for part in parts}
    for name, tensor in wanted.items():
        stem, _, kind = name.rpartition(".")  # "...self_attn.q_proj" and "weight"
        part = stem.rpartition(".")[2]
        if part in fused_names:
            parent, fused_name = stem.removesuffix(part), fused_names[part]
            parts = fused_tensors[fused_name]
            rows = [wanted[f"{parent}{other}.{kind}"].shape[0] for other in parts]
            name = f"{parent}{fused_name}.{kind}"
            shape = (sum(rows), *tensor.shape[1:])
            start = tensor.start + sum(rows[: parts.index(part)])
            tensor = replace(tensor, shape=shape, start=start)
        yield name, tensor


def _load_safetensors(model: nn.Module, path: Path) -> None:
    expected = expected_tensors(model)
    files = _weight_files(path)
    file_of: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with _open(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                tensor = tensors.get_slice(name)
                if name in file_of:
                    raise ValueError(f"{name} is both in {file_of[name].name} and in {file}")
                if tensor.get_dtype() not in _STORED_DTYPES:
                    raise ValueError(f"{name} in {file} is stored as {tensor.get_dtype()}")
                file_of[name] = file
                shapes[name] = tuple(tensor.get_shape())
    _check_names_and_shapes(expected, shapes, model.ignored_tensors, path)
    for file in files:
        with _open(file) as tensors:
            for name, targets in expected.items():
                if file_of[name] == file:
                    for target in targets:
                        _copy(tensors.get_slice(name), target)


def _check_names_and_shapes(
    expected: Mapping[str, list[CheckpointTensor]],
    shapes: dict[str, tuple[int, ...]],
    ignored: frozenset[str],
    path: Path,
) -> None:
    missing = sorted(expected.keys() - shapes.keys())
    unexpected = sorted(shapes.keys() - expected.keys() - ignored)
    misshapen = [
        f"{name} is {list(shapes[name])}, not {list(target.shape)}"
        for name, (target, *_) in expected.items()  # parts of one tensor agree on its shape
        if name in shapes and shapes[name] != target.shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    told = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
    if told:
        raise ValueError(f"the weights in {path} do not fit the model: {told}")


def _weight_files(path: Path) -> list[Path]:
    single, index = path / SINGLE_FILE, path / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        pickled = sorted(file.name for file in path.glob("*.bin"))
        advice = f"; {pickled} are pickles, which may run code: save them anew with transformers"
        raise ValueError(
            f"{path} is no checkpoint: it has no {SINGLE_FILE} and no index of one"
            + (advice if pickled else "")
        )
    files = [path / name for name in shard_names(index)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"{index} names files that are not there: {', '.join(absent)}")
    return files


def shard_names(index: Path) -> list[str]:
    """The files of a sharded checkpoint."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(Path(name)) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error!r}") from error


class _open:
    """`safe_open` whose errors name the file."""

    def __init__(self, file: Path) -> None:
        try:
            self._file = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged or no safetensors file: {error}") from error

    def __enter__(self) -> safe_open:
        return self._file.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)


def _copy(source: "safe_open", target: CheckpointTensor) -> None:
    part = slice(target.start, target.start + target.destination.shape[target.dim])
    data = source[part] if target.dim == 0 else source[:, part]
    with torch.no_grad():
        target.destination.copy_(data)


def _fill_randomly(model: nn.Module) -> None:
    """Normal weights of a trained model's size, norms of one: no NaN, and no flat logits."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02, generator=generator)
