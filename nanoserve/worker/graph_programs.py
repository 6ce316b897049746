"""Graph programs: parts of a step that are captured once, and replayed in each step they cover.

A device has a list of them and takes the first that covers a step; what none covers is launched
kernel by kernel. So options combine: each adds a program, and none has to know of another.

    decode + sampling       capture_sampling=True (`sampling_program`)
    decode                  every row has one token
    draft rows              speculative_config (`draft_program`), also with sampling
    mixed steps             some row has several tokens: `capture_mixed_steps` (`mixed_program`)

A step belongs to the batch as it was packed, so a program may bring rows to a common length, or add
rows and tokens that belong to nobody.
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
    """What a device replays in the place of launches."""

    def covers(self, batch: Batch, header: BatchHeader) -> bool:
        """Return whether `replay` computes this step. All ranks must come to the same answer."""

    def capture(self, *, shows_progress: bool) -> None:
        """Record what has to be there before the first `replay`, once."""

    def replay(self, batch: Batch, header: BatchHeader) -> StepOutput:
        """Copy the batch in and launch the step, or more of it: see `StepOutput.token_ids`."""


class RowsProgram(GraphProgram, Protocol):
    """A program of rows that all have `query_len` tokens: what samples can follow it."""

    graphs: SizedGraphs
    query_len: int


class DecodeProgram:
    """Steps in which every row has one token.

    fills_in_pending: whether the graph puts the tokens in that only the device knows; or else it is
    launched before, in steps that have some.
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
        """A row of the last token of a prompt looks like any decode row, and is one."""
        return header.max_query_len == 1 and header.num_rows <= self.graphs.sizes[-1]

    def capture(self, *, shows_progress: bool) -> None:
        self._buffers.copy_in_dummies(self.graphs.sizes[-1], 1, self._computation.block_size)
        self.graphs.capture(self._cuda, self.launch, shows_progress=shows_progress)

    def launch(self, num_rows: int) -> torch.Tensor:
        """Launch what a graph records: rows of one token, of contexts up to the longest."""
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
        if len(missing) and batch.layout.num_groups > 1:  # then tables move
            batch = self._buffers.own_copy(batch, header)
        filled = append_dummy_rows(batch, header, missing, self._computation.block_size)
        self._buffers.copy_in(batch, filled)
        tensors = self._buffers.tensors
        if header.num_pending and not self._fills_in_pending:
            tensors.fill_in_pending(filled, self._computation.last_token)
        return StepOutput(tensors, self.graphs.replay(size))
