"""CUDA graphs of steps with adapters: a second set, so that other steps compute none.

The programs are those of steps without adapters. What they record has, after each linear layer, the
kernels of adapters, with as many tiles as the tokens of a graph can take (`PlaceTiles`). Before a
replay, the tiles of the step are written to the memory that these kernels read; tiles that it does
not have are empty. The matrices of an adapter are in a place of fixed addresses, too. So a graph
computes whatever adapters the rows have.

A step that no program covers is launched kernel by kernel, and so is one with given embeddings.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.models.layers.low_rank import Adapters
from nanoserve.worker.adapters import AdaptedForward
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cpu_device import Computation, StepOutput
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.graph_programs import GraphProgram

T = TypeVar("T")


@dataclass(frozen=True)
class AdaptedComputation(Computation):
    """A computation in which adapters change as many tokens as there are, in any places."""

    def forward(
        self,
        tensors: BatchTensors,
        header: BatchHeader,
        block_tables: Tensor,
        is_mixed: bool = False,
    ) -> Tensor:
        adapters: Adapters = self.adapters
        with adapters.using(adapters.rows_of_graph(header.num_tokens)):
            return super().forward(tensors, header, block_tables, is_mixed)


class AdaptedGraphs:
    """The programs of steps with adapters; none before `capture`.

    computation: what they record.
    """

    def __init__(self, buffers: CudaBuffers, plain: Computation) -> None:
        self._buffers, self._plain = buffers, plain
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        self.computation = AdaptedComputation(**values)
        self.programs: list[GraphProgram] = []

    @classmethod
    def of(cls, buffers: CudaBuffers, computation: Computation) -> "AdaptedGraphs | None":
        """Return the graphs of an engine whose kernels read places; None for other engines."""
        adapters: Adapters | None = computation.adapters
        has_tiles = adapters is not None and adapters.tiles is not None
        return cls(buffers, computation) if has_tiles else None

    def record(self, capture: Callable[[Computation], T]) -> T:
        """Return what `capture` returns for the computation that graphs of such steps record.

        Before, all tiles are emptied: a capture runs the kernels, and may have fewer tokens than
        the tiles of the step before it.
        """
        self.computation.adapters.tiles.fill(np.empty(0, dtype=np.int32))
        return capture(self.computation)

    def capture(self, capture: Callable[[Computation], list[GraphProgram]]) -> None:
        """Keep the programs that `capture` captures, for `replay`."""
        self.programs = self.record(capture)

    def replay(self, batch: Batch, header: BatchHeader, forward: Any) -> StepOutput | None:
        """Replay a step; None if no graph has recorded it."""
        if not isinstance(forward, AdaptedForward) or forward.inner != self._plain.forward:
            return None
        for program in self.programs:
            if program.covers(batch, header):
                with self._buffers.sending(partial(self._send_tiles, forward.places)):
                    return program.replay(batch, header)
        return None

    def _send_tiles(self, places: np.ndarray, batch: Batch) -> None:
        """Send the tiles of a batch whose rows a program may have padded, but not moved."""
        self.computation.adapters.rows_of(places, batch.cu_seqlens_q)
