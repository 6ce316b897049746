"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021): y = W x + B A x, row by row.

The rows of a batch may have different adapters, which lie in *places*. W is multiplied as ever, for
all rows together. Then, for each adapter that the step has, two thin products are added to its
rows, and nothing to rows without one:

    y[rows] += (x[rows] A) B        A [inputs, rank], B [rank, outputs]

Here both are stored transposed, and B includes the factor alpha / rank. Tensor parallelism splits
them as it splits W: a column-parallel layer has all of A and a part of B's outputs; a row-parallel
layer has a part of A's inputs, and its results are summed together with those of W.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.models.layers.adapter_tiles import PlaceTiles, tokens_by_place
from nanoserve.models.layers.context import LayerContext, LinearMethod
from nanoserve.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanoserve.sampling.host_copies import to_device

_GROUP = 8  # rows of an adapter that the kernel computes at once
_LANES = 16  # the kernel reads this many numbers at once
_MOST_COPIED = 1024  # tokens, whose inputs and outputs torch's products copy

Weights = Mapping[str, tuple[Tensor, Tensor]]
# (x, y, a, b, ends, firsts, *groups): see `add_low_rank` of `nanoserve.kernels.cpu.low_rank` and of
# `nanoserve.kernels.triton.low_rank`
Kernel = Callable[..., None]
Zeros = Callable[[tuple[int, ...]], Tensor]


class Target(NamedTuple):
    """A matrix that an adapter may change, and the part of it that this rank has.

    name: in checkpoints. shape: of the whole matrix, (outputs, inputs). outputs, inputs: this
    rank's part. first: the column of the layer's result where its outputs begin.
    """

    name: str
    shape: tuple[int, int]
    outputs: slice
    inputs: slice
    first: int

    @property
    def columns(self) -> slice:
        """The columns of the layer's result that are this matrix's outputs."""
        return slice(self.first, self.first + self.outputs.stop - self.outputs.start)


def targets_of(path: str, layer: nn.Module) -> list[Target]:
    """Return the matrices of a linear layer, in the order of their outputs; [] for other modules.

    path: the layer's name in the model.
    """
    if isinstance(layer, RowParallelLinear):
        start = layer.tp.rank * layer.part
        outputs, inputs = slice(0, layer.shape[0]), slice(start, start + layer.part)
        return [Target(path, layer.shape, outputs, inputs, 0)]
    if not isinstance(layer, ColumnParallelLinear):
        return []
    targets, first, parent = [], 0, path.rpartition(".")[0]
    for name, total in layer.outputs.items():
        start, size = layer.start_of(name), layer.sizes[name]
        inputs = slice(0, layer.in_features)
        shape, outputs = (total, layer.in_features), slice(start, start + size)
        targets.append(Target(f"{parent}.{name}", shape, outputs, inputs, first))
        first += size
    return targets


class StepRows(NamedTuple):
    """The tokens of a step that have an adapter.

    by_adapter: (place, tokens) of each adapter, for torch, in parts whose inputs and outputs can be
    copied; a slice, which needs no copy, if one adapter has all tokens of the step.
    groups: for a kernel, int32. On a CPU, the tokens, where groups of them begin, and the place of
    each group; on a GPU, the `views` of `PlaceTiles`. One of the two is empty.
    """

    by_adapter: list[tuple[int, "Tensor | slice"]]
    groups: tuple[Tensor, ...]

    @classmethod
    def of(cls, places: np.ndarray, has_kernel: bool, device: torch.device) -> "StepRows":
        """Group tokens by adapter. places: by token, -1 for none."""
        by_place = tokens_by_place(places)
        if not has_kernel:
            whole = slice(0, len(places))
            if [len(one) for one in by_place.values()] == [len(places)]:
                return cls([(place, whole) for place in by_place], ())
            rows = to_device(device, *by_place.values())  # without waiting for the steps before it
            owners = zip(by_place, rows, strict=True)
            return cls([(p, part) for p, own in owners for part in own.split(_MOST_COPIED)], ())
        starts, of_groups = [0], []
        for place, own in by_place.items():
            for first in range(0, len(own), _GROUP):
                starts.append(starts[-1] + min(_GROUP, len(own) - first))
                of_groups.append(place)
        arrays = np.concatenate([*by_place.values()]), np.array(starts), np.array(of_groups)
        return cls([], tuple(torch.from_numpy(one.astype(np.int32)) for one in arrays))


class AdaptedLayer:
    """The matrices of all adapters for one linear layer.

    A's of several targets lie side by side, so one product yields x A of them all.
    """

    def __init__(
        self,
        targets: list[Target],
        num_places: int,
        max_rank: int,
        zeros: Zeros,
    ) -> None:
        self.targets = targets
        inputs, outputs = targets[0].inputs, targets[-1].columns.stop
        num_inputs = inputs.stop - inputs.start
        num_ranks = -(-len(targets) * max_rank // _LANES) * _LANES
        self.a = zeros((num_places, num_inputs, num_ranks))
        self.b = zeros((num_places, max_rank, outputs))
        # By place: where the ranks of each target end, after a 0. On the device: a kernel reads it.
        device = self.a.device
        self.ends = torch.zeros(num_places, len(targets) + 1, dtype=torch.int32, device=device)
        # The columns where the outputs of each target begin, and their end.
        firsts = [target.first for target in targets]
        self.firsts = torch.tensor([*firsts, outputs], dtype=torch.int32, device=device)
        self._ranks: dict[int, list[tuple[int, int]]] = {}  # by place, of targets with an adapter

    def load(self, place: int, weights: Weights) -> None:
        """Copy this rank's part of an adapter to a place."""
        end, parts = 0, []
        for index, target in enumerate(self.targets):
            start = end
            if target.name in weights:
                a, b = weights[target.name]
                end = start + len(a)
                self.a[place, :, start:end] = a[:, target.inputs].T
                self.b[place, : len(a), target.columns] = b[:, target.outputs]
                parts.append((start, end))
            else:
                parts.append((start, start))
            self.ends[place, index + 1] = end
        self._ranks[place] = parts
        if end == 0:
            del self._ranks[place]

    @property
    def is_used(self) -> bool:
        return bool(self._ranks)

    def add(self, x: Tensor, y: Tensor, rows: StepRows, kernel: Kernel | None) -> None:
        """Add B A x to y, in place: x [num_tokens, inputs], y [num_tokens, outputs]."""
        if kernel is not None:
            kernel(x, y, self.a, self.b, self.ends, self.firsts, *rows.groups)
        for place, tokens in rows.by_adapter:
            if place in self._ranks:
                self._add_rows(x, y, place, tokens)

    def _add_rows(self, x: Tensor, y: Tensor, place: int, tokens: "Tensor | slice") -> None:
        parts, own = self._ranks[place], y[tokens]  # a view for a slice, else a copy
        narrow = x[tokens] @ self.a[place, :, : parts[-1][1]]
        for target, (start, end) in zip(self.targets, parts, strict=True):
            if start < end:
                b = self.b[place, : end - start, target.columns]
                own[:, target.columns].addmm_(narrow[:, start:end], b)
        if not isinstance(tokens, slice):
            y[tokens] = own


class LowRankMethod:
    """A linear method that adds the adapters' products to those of another one."""

    def __init__(self, inner: LinearMethod, layer: AdaptedLayer, adapters: "Adapters") -> None:
        self.inner, self._layer, self._adapters = inner, layer, adapters

    def create_weights(
        self, layer: nn.Module, in_features: int, out_features: int, context: LayerContext
    ) -> None:
        raise RuntimeError("adapters are added to a model that has its weights")

    def process_after_loading(self, layer: nn.Module) -> None:
        self.inner.process_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = self.inner.apply(layer, x)
        rows = self._adapters.rows
        if rows is not None and (self._layer.is_used or self._adapters.skips_no_layer):
            self._layer.add(x, y, rows, self._adapters.kernel)
        return y


class Adapters:
    """The adapters of one rank's model, and the rows of the step that is computed.

    num_places: most adapters in a batch. zeros: allocates matrices of a shape on the device, in the
    adapters' data type. kernel: adds the products of all rows, whose bits then depend on no other
    row; None leaves them to torch. tiles: where a GPU's kernel finds the rows.
    """

    def __init__(
        self,
        num_places: int,
        max_rank: int,
        zeros: Zeros,
        device: torch.device,
        kernel: Kernel | None = None,
        tiles: PlaceTiles | None = None,
    ) -> None:
        self._shape = (num_places, max_rank, zeros)
        self._device, self.kernel, self.tiles = device, kernel, tiles
        self._layers: dict[str, AdaptedLayer] = {}  # by the layer's path
        self.rows: StepRows | None = None

    def attach(self, model: nn.Module) -> None:
        """Let the linear layers of a loaded model add the adapters, which stay in their places."""
        for path, layer in model.named_modules():
            targets = targets_of(path, layer)
            if targets:
                if path not in self._layers:
                    self._layers[path] = AdaptedLayer(targets, *self._shape)
                wrap = partial(LowRankMethod, layer=self._layers[path], adapters=self)
                layer.wrap_method(wrap)

    @property
    def skips_no_layer(self) -> bool:
        """Return True if the kernel runs for all layers, also for those that no adapter changes.

        So what is compiled ahead, and what a graph records, is the same for all adapters.
        """
        return self.tiles is not None

    def load(self, place: int, weights: Weights) -> None:
        """Copy an adapter to a place, in place of what it had."""
        for layer in self._layers.values():
            layer.load(place, weights)

    def rows_of(self, places: np.ndarray, cu_seqlens: np.ndarray) -> StepRows:
        """Return the tokens of a step that have an adapter.

        places: by row, the place of its adapter, -1 for none. cu_seqlens: where the tokens of each
        row begin, and the end.
        """
        by_token = np.repeat(places, np.diff(cu_seqlens[: len(places) + 1]))
        if self.tiles is not None:
            return StepRows([], self.tiles.fill(by_token))
        return StepRows.of(by_token, self.kernel is not None, self._device)

    def rows_of_graph(self, num_tokens: int) -> StepRows:
        """Return rows for the capture of a graph, whose kernels find those of a step in `tiles`."""
        return StepRows([], self.tiles.views_of_graph(num_tokens))

    @contextmanager
    def using(self, rows: StepRows) -> Iterator[None]:
        """Add the adapters to these rows, in forward passes inside the context only.

        So whatever runs outside of it, such as the capture of a graph, computes no adapter.
        """
        self.rows = rows
        try:
            yield
        finally:
            self.rows = None


def all_targets(model: nn.Module) -> Iterator[Target]:
    """Yield the matrices of a model that an adapter may change."""
    for path, layer in model.named_modules():
        yield from targets_of(path, layer)
