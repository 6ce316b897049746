"""Load safetensors files into parameters. Names and shapes must match exactly.

Loading is strict because a wrong checkpoint that loads would generate garbage without an error.

Several threads map the files into memory and copy them in small pieces. Pages of a mapped file
count as this process's memory for as long as it is mapped, so each piece maps the file again.
Memory never holds the model twice, not even a model in a single file.
"""

import logging
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nanoserve.checkpoint.checkpoint_tensor import CheckpointTensor
from nanoserve.checkpoint.errors import describe_mismatches
from nanoserve.checkpoint.stacks import stacks_of, tensors_of
from nanoserve.checkpoint.text_part import name_in_model
from nanoserve.checkpoint.weight_files import Weights, open_weights, weight_files

logger = logging.getLogger(__name__)

# Bytes of a value. Any other type is a quantized format, whose values need decoding.
_STORED_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_MAX_THREADS = 16  # a few threads saturate the disk or the memory bandwidth
_MAX_PIECE = 64 * 2**20  # bytes that a thread copies before it unmaps the file


def load_weights(
    model: nn.Module,
    path: Weights,
    load_format: str = "auto",
    elsewhere: Set[str] = frozenset(),
    *,
    shows_progress: bool = True,
) -> None:
    """Fill the parameters of `model` from the safetensors files in `path`.

    `path` may also be a state dictionary. Reads a single file or sharded files with an index, and
    only this rank's slice of each tensor. The `load_format` "dummy" fills the parameters with
    random values instead. The files may also hold the tensors named in `elsewhere`, which belong to
    other pipeline stages. Raises `ValueError` as `check_weights` does, before anything is copied. A
    progress bar appears after one second.
    """
    early: list[nn.Module] = []
    if load_format == "dummy":
        fill_randomly(model)
    else:
        early = _load_safetensors(model, path, elsewhere, shows_progress)
    for module in model.modules():
        if hasattr(module, "process_after_loading") and module not in early:
            module.process_after_loading()


def fill_randomly(model: nn.Module) -> None:
    """Fill norms with ones, and other weights with normal values (std 0.02, as in trained models).

    This avoids NaN and flat logits.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.02, generator=generator)


def expected_tensors(
    model: nn.Module, stored: Container[str] = ()
) -> dict[str, list[CheckpointTensor]]:
    """Return every checkpoint tensor that `model` needs, by full name, with what it fills.

    stored: the names in the checkpoint, which show whether it has stacks of experts.

    Most tensors fill one parameter; several layers may read the same tensor. Where a checkpoint
    stores several linears as one tensor, the model's class declares it: `fused_tensors =
    {"gate_up_proj": ("gate_proj", "up_proj")}` means that gate_up_proj has the rows of gate_proj,
    followed by the rows of up_proj.
    """
    expected: dict[str, list[CheckpointTensor]] = {}
    for path, module in model.named_modules():
        if hasattr(module, "checkpoint_tensors"):
            tensors = tensors_of(module, path, stored)
            for name, tensor in tensors.items():
                expected.setdefault(name, []).append(tensor)
    if hasattr(model, "fused_tensors"):
        expected = _as_stored(expected, model.fused_tensors)
    return {name: parts for name, parts in expected.items() if name not in model.tied_tensors}


def possible_tensors(model: nn.Module) -> set[str]:
    """Return the names of the tensors that a checkpoint of `model` may have.

    More than it does have: those of single experts, and their stacks.
    """
    modules = model.named_modules()
    stacks = {name for path, module in modules for name in stacks_of(module, path)}
    return stacks | expected_tensors(model).keys()


def _as_stored(
    expected: Mapping[str, list[CheckpointTensor]], fused_tensors: Mapping[str, tuple[str, ...]]
) -> dict[str, list[CheckpointTensor]]:
    """Return the tensors by their names in the checkpoint, with offsets in the stored tensor."""
    stored: dict[str, list[CheckpointTensor]] = {}
    fused_names = {part: name for name, parts in fused_tensors.items() for part in parts}
    for name, tensors in expected.items():
        stem, _, kind = name.rpartition(".")  # "...self_attn.q_proj" and "weight"
        part = stem.rpartition(".")[2]
        if part in fused_names:
            parent, fused_name = stem.removesuffix(part), fused_names[part]
            parts = fused_tensors[fused_name]
            rows = [expected[f"{parent}{other}.{kind}"][0].shape[0] for other in parts]
            name = f"{parent}{fused_name}.{kind}"
            shape = (sum(rows), *tensors[0].shape[1:])
            before = sum(rows[: parts.index(part)])
            tensors = [replace(each, shape=shape, start=each.start + before) for each in tensors]
        stored.setdefault(name, []).extend(tensors)
    return stored


class Stored(NamedTuple):
    """A tensor stored in a file; `name` is its name there."""

    file: Weights
    name: str
    shape: tuple[int, ...]
    value_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.value_bytes * math.prod(self.shape[1:])


class _Copy(NamedTuple):
    """Rows of a stored tensor and their destination."""

    file: Weights
    name: str
    part: tuple[slice, ...]
    destination: Tensor
    num_bytes: int  # of the whole rows in the file


def check_weights(
    model: nn.Module, path: Weights, elsewhere: Set[str] = frozenset()
) -> tuple[dict[str, list[CheckpointTensor]], dict[str, Stored]]:
    """Return the tensors that `model` needs, and those in the files in `path`, in file order.

    The model may be on torch's "meta" device, without memory. Raises `ValueError`, with the names
    of the offending tensors, unless the two sets match. Tied tensors, and those named in
    `elsewhere`, may be stored or not.
    """
    stored = stored_tensors(path)
    expected = expected_tensors(model, stored)
    wanted = {name: parts[0].shape for name, parts in expected.items()}  # parts agree on it
    found = {name: tensor.shape for name, tensor in stored.items()}
    others = model.tied_tensors.keys() | elsewhere | unused_tensors(model, found)
    if wanted != {name: found[name] for name in found.keys() - others}:
        mismatches = describe_mismatches(wanted, found, others)
        raise ValueError(f"the weights in {path} do not match the model: {mismatches}")
    return expected, stored


def unused_tensors(model: nn.Module, names: Iterable[str], *, says_so: bool = False) -> set[str]:
    """Return those of the stored `names` that the model has no use for, such as an extra layer's.

    The model's class declares how they begin: `unused_tensors = ("model.layers.61.",)`. says_so:
    log their number.
    """
    beginnings = getattr(model, "unused_tensors", ())
    unused = {name for name in names if name.startswith(beginnings)}
    if unused and says_so:
        begin = ", ".join(beginnings)
        logger.warning("%d tensors are not used, and not read: those of %s", len(unused), begin)
    return unused


def _load_safetensors(
    model: nn.Module, path: Weights, elsewhere: Set[str], shows_progress: bool
) -> list[nn.Module]:
    """Fill `model`; return the modules whose `process_after_loading` has been called.

    A tied LM head is read and processed before all other weights. It is by far the largest weight,
    and processing needs two copies for a moment: later, these would add to the peak memory.
    """
    expected, stored = check_weights(model, path, elsewhere)
    unused_tensors(model, stored, says_so=shows_progress)
    if model.tied_tensors.keys() & stored.keys():
        check_tied(model.tied_tensors, stored)
    num_threads = _num_threads()
    size = sum(parameter.nbytes for parameter in model.parameters())
    # All threads together map at most a twentieth of the model, or a few MiB.
    piece_bytes = min(max(size // (20 * num_threads), 2**20), _MAX_PIECE)
    tied = set(model.tied_tensors.values()) & expected.keys()
    total = sum(  # whole rows, as they are read
        part.destination.shape[0] * stored[name].row_bytes
        for name, parts in expected.items()
        for part in parts
    )
    options = {"unit": "B", "unit_scale": True, "delay": 1, "dynamic_ncols": True}
    bar = tqdm(desc="Loading weights", total=total, disable=not shows_progress, **options)
    early: list[nn.Module] = []
    with bar:
        for names in (tied, expected.keys() - tied):
            # Drop the entries that have been read: their views would keep a weight alive after its
            # layer has replaced it.
            targets = {name: expected.pop(name) for name in stored if name in names}
            with _one_thread_each(num_threads) as pool:
                copies = [
                    copy
                    for name, parts in targets.items()
                    for part in parts
                    for copy in _copies(stored[name], part, piece_bytes)
                ]
                for num_bytes in pool.map(_copy, _pieces(copies, piece_bytes)):
                    bar.update(num_bytes)
            del targets, copies
            if names is tied and tied and hasattr(model.lm_head, "process_after_loading"):
                model.lm_head.process_after_loading()
                early.append(model.lm_head)
    return early


def stored_tensors(path: Weights) -> dict[str, Stored]:
    """Return the tensors in the files in `path`, in file order, by the names in the model.

    Raises `ValueError` for a name that is stored twice, and for a type that is not a float.
    """
    stored: dict[str, Stored] = {}
    for file in weight_files(path):
        with open_weights(file) as tensors:
            for own_name in tensors.offset_keys():
                name = name_in_model(path, own_name)
                if name is None:
                    continue
                tensor = tensors.get_slice(own_name)
                dtype = tensor.get_dtype()
                if name in stored:
                    raise ValueError(f"{name:.99} is both in {stored[name].file} and in {file}")
                if dtype not in _STORED_DTYPES:
                    raise ValueError(
                        f"{name:.99} in {file} is stored as {dtype}; without quantization_config "
                        f"in config.json, it must be one of {', '.join(_STORED_DTYPES)}"
                    )
                shape = tuple(tensor.get_shape())
                stored[name] = Stored(file, own_name, shape, _STORED_DTYPES[dtype])
    return stored


def _copies(source: Stored, target: CheckpointTensor, piece_bytes: int) -> Iterator[_Copy]:
    """Yield the copies of one tensor: several, of some rows each, if it exceeds a piece."""
    part = [slice(0, size) for size in source.shape]
    part[target.dim] = slice(target.start, target.start + target.destination.shape[target.dim])
    first, end = part[0].start, part[0].stop
    row_bytes = source.row_bytes
    num_rows = max(1, piece_bytes // row_bytes)
    for row in range(first, end, num_rows):
        rows = slice(row, min(row + num_rows, end))
        destination = target.destination[rows.start - first : rows.stop - first]
        num_bytes = (rows.stop - rows.start) * row_bytes
        yield _Copy(source.file, source.name, (rows, *part[1:]), destination, num_bytes)


def _pieces(copies: list[_Copy], piece_bytes: int) -> Iterator[list[_Copy]]:
    """Group neighbouring copies from one file into pieces of about `piece_bytes`."""
    piece: list[_Copy] = []
    num_bytes = 0
    for copy in copies:
        if piece and (num_bytes + copy.num_bytes > piece_bytes or copy.file != piece[0].file):
            yield piece
            piece, num_bytes = [], 0
        piece.append(copy)
        num_bytes += copy.num_bytes
    if piece:
        yield piece


@torch.inference_mode()
def _copy(piece: list[_Copy]) -> int:
    """Map the file, copy the piece and unmap the file; return the number of bytes."""
    with open_weights(piece[0].file) as tensors:
        for copy in piece:
            rows = tensors.get_slice(copy.name)[copy.part]
            copy.destination.copy_(rows.reshape(copy.destination.shape))
    return sum(copy.num_bytes for copy in piece)


def _num_threads() -> int:
    """Return the number of cores that this process may use, at most `_MAX_THREADS`."""
    is_linux = hasattr(os, "sched_getaffinity")
    return min(len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1, _MAX_THREADS)


@contextmanager
def _one_thread_each(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Provide a pool in whose threads torch starts no further ones, which would contend."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as p:
            yield p
    finally:
        torch.set_num_threads(before)  # otherwise later threads would be limited to one as well


def check_tied(tied: Mapping[str, str], stored: Mapping[str, Stored]) -> None:
    """Raise `ValueError` if a stored tensor differs from the one to which it is tied.

    `tied` maps a tensor's name to its twin's name.
    """
    for name, twin in tied.items():
        if name not in stored:
            continue
        one, other = stored[name], stored[twin]
        with open_weights(one.file) as tensors, open_weights(other.file) as twins:
            if not torch.equal(tensors.get_tensor(one.name), twins.get_tensor(other.name)):
                raise ValueError(
                    f"tie_word_embeddings is true, but {name} differs from {twin}; if that is "
                    f"intended, set tie_word_embeddings to false in config.json"
                )
