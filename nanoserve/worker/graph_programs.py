"""Graph programs are parts of a step that are captured once and replayed in the steps they cover.

A device has a list of them and uses the first that covers a step; a step that none covers is
launched kernel by kernel. So options combine: each adds a program that is independent of the
others.

    decode + sampling       capture_sampling=True (`sampling_program`)
    decode                  every row has one token
    draft rows              speculative_config (`draft_program`), also with sampling
    mixed steps             some row has several tokens: `capture_mixed_steps` (`mixed_program`)

Steps with adapters have a list of their own (`adapted_graphs`), of the same programs.

The covered step is the batch as it was packed. A program may pad rows to a common length, or add
padding rows and tokens that belong to no sequence.
"""

from typing import Protocol

import numpy as np
import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.cpu_device import Computation, StepOutput
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_graphs import SizedGraphs
from nanoserve.worker.dummy_rows import append_dummy_rows


class GraphProgram(Protocol):
    """The interface of a captured part of a step, which is replayed instead of launched."""

    def covers(self, batch: Batch, header: BatchHeader) -> bool:
        """Return True if `replay` computes this step. All ranks must reach the same decision."""

    def capture(self, *, shows_progress: bool) -> None:
        """Capture the graphs, once, before the first `replay`."""

    def replay(self, batch: Batch, header: BatchHeader) -> StepOutput:
        """Copy the batch to the device and launch the step; a program may include sampling."""


class RowsProgram(GraphProgram, Protocol):
    """A program whose rows all have `query_len` tokens; a sampling program can follow it."""

    graphs: SizedGraphs
    query_len: int


class DecodeProgram:
    """CUDA graphs for steps in which every row has one token.

    fills_in_pending: True if the graph itself fills in pending tokens; otherwise that is launched
    before the graph, in steps that have some.
    """

    query_len = 1

    def __init__(
        self,
        cuda: Cuda,
        buffers: CudaBuffers,
        computation: Computation,
        sizes: list[int],
        fills_in_pending: bool,
    ) -> None:
        self.graphs = SizedGraphs(sizes)
        self._cuda, self._buffers, self._computation = cuda, buffers, computation
        self._fills_in_pending = fills_in_pending

    def covers(self, batch: Batch, header: BatchHeader) -> bool:
        """Return True for a step of decode rows; a row with a prompt's last token is one, too."""
        return header.max_query_len == 1 and header.num_rows <= self.graphs.sizes[-1]

    def capture(self, *, shows_progress: bool) -> None:
        self._buffers.copy_in_dummies(self.graphs.sizes[-1], 1, self._computation.block_size)
        self.graphs.capture(self._cuda, self.launch, shows_progress=shows_progress)

    def launch(self, num_rows: int) -> torch.Tensor:
        """Launch what a graph captures: rows of one token, of contexts up to the longest."""
        header = BatchHeader(
            num_tokens=num_rows,
            num_rows=num_rows,
            num_decode_rows=num_rows,
            max_query_len=1,
            max_context_len=self._computation.max_model_len,
        )
        tensors = self._buffers.tensors
        if self._fills_in_pending:
            tensors.fill_in_pending(header, self._computation.last_token)
        return self._computation.forward(tensors, header, self._buffers.tables(num_rows))

    def replay(self, batch: Batch, header: BatchHeader) -> StepOutput:
        size = self.graphs.size_for(header.num_rows)
        missing = np.ones(size - header.num_rows, dtype=np.int32)
        if len(missing) and batch.layout.num_groups > 1:  # padding rows then shift the block tables
            batch = self._buffers.own_copy(batch, header)
        filled = append_dummy_rows(batch, header, missing, self._computation.block_size)
        self._buffers.copy_in(batch, filled)
        tensors = self._buffers.tensors
        if header.num_pending and not self._fills_in_pending:
            tensors.fill_in_pending(filled, self._computation.last_token)
        return StepOutput(tensors, self.graphs.replay(size))
