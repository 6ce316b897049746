"""CUDA graphs for steps with draft tokens: `speculative_config={..., "enforce_eager": False}`.

The rows of such a step differ in length, and those of a graph do not. So every row is padded to the
largest possible length, `num_speculative_tokens` + 1, by padding tokens before its tokens:

    row       [ a7 a8 ]            a7 is known, a8 a draft token; the context has 9 tokens
    filled    [ 0 0 0 a7 a8 ]      at positions 4 ... 8

A padding token attends to the context up to its position, which is in the cache; its result is
never read, and its K and V are written to the dummy block. So no kernel has a special case for it.
A row with a context shorter than that length cannot be padded, and its step is launched kernel by
kernel.

All of this follows from the batch, so ranks that share it choose the same graph. This has not run
on several GPUs.
"""

import numpy as np
import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.cpu_device import Computation, StepOutput
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_graphs import SizedGraphs
from nanoserve.worker.dummy_rows import append_dummy_rows


def fill_rows(batch: Batch, header: BatchHeader, length: int, block_size: int) -> BatchHeader:
    """Pad every row to `length` tokens; return the header of the padded step.

    `batch.header` still counts the real tokens. These are moved, so `batch` must be one that no
    other rank reads.
    """
    rows, tokens = header.num_rows, header.num_tokens
    counts = np.diff(batch.cu_seqlens_q[: rows + 1])
    # A token is shifted by the padding of its own row and of all rows before it.
    moved = np.arange(tokens) + np.repeat(np.cumsum(length - counts), counts)
    all_tokens = rows * length
    first = batch.context_lens[:rows] - length
    positions = (first[:, None] + np.arange(length, dtype=np.int32)).ravel()
    for values, fillers in (
        (batch.input_ids, np.zeros(all_tokens, dtype=np.int32)),
        *((slots, positions % block_size) for slots in batch.slot_mapping),  # of each group
    ):
        fillers[moved] = values[:tokens]
        values[:all_tokens] = fillers
    batch.positions[:all_tokens] = positions
    batch.cu_seqlens_q[: rows + 1] = np.arange(rows + 1) * length
    batch.output_rows[: header.num_outputs] = moved[batch.output_rows[: header.num_outputs]]
    return header._replace(num_tokens=all_tokens, num_decode_rows=0, max_query_len=length)


class DraftProgram:
    """CUDA graphs for steps with draft tokens, whose rows have at most `query_len` tokens."""

    def __init__(
        self,
        cuda: Cuda,
        buffers: CudaBuffers,
        computation: Computation,
        sizes: list[int],
        query_len: int,
    ) -> None:
        most = buffers.layout.max_num_tokens // query_len
        self.graphs = SizedGraphs(sorted({min(size, most) for size in sizes}))
        self.query_len = query_len
        self._cuda, self._buffers, self._computation = cuda, buffers, computation

    def covers(self, batch: Batch, header: BatchHeader) -> bool:
        rows = header.num_rows
        return (
            1 < header.max_query_len <= self.query_len
            and rows <= self.graphs.sizes[-1]
            and bool((batch.context_lens[:rows] >= self.query_len).all())
        )

    def capture(self, *, shows_progress: bool) -> None:
        block_size = self._computation.block_size
        self._buffers.copy_in_dummies(self.graphs.sizes[-1], self.query_len, block_size)
        self.graphs.capture(self._cuda, self.launch, shows_progress=shows_progress)

    def launch(self, num_rows: int) -> torch.Tensor:
        """Launch what a graph captures: rows of `query_len` tokens, in the longest contexts."""
        header = BatchHeader(
            num_tokens=num_rows * self.query_len,
            num_rows=num_rows,
            max_query_len=self.query_len,
            max_context_len=self._computation.max_model_len,
        )
        tables = self._buffers.tables(num_rows)
        return self._computation.forward(self._buffers.tensors, header, tables)

    def replay(self, batch: Batch, header: BatchHeader) -> StepOutput:
        length, block_size = self.query_len, self._computation.block_size
        own = self._buffers.own_copy(batch, header)
        header = fill_rows(own, header, length, block_size)
        size = self.graphs.size_for(header.num_rows)
        missing = np.full(size - header.num_rows, length, dtype=np.int32)
        self._buffers.copy_in(own, append_dummy_rows(own, header, missing, block_size))
        if header.num_pending:
            self._fill_in_pending(header.num_rows)
        return StepOutput(self._buffers.tensors, self.graphs.replay(size))

    def _fill_in_pending(self, num_rows: int) -> None:
        """Fill in pending tokens, each of which is now the last token of its padded row."""
        tensors, last_token = self._buffers.tensors, self._computation.last_token
        places = tensors.cu_seqlens_q[1 : num_rows + 1] - 1
        found, known = tensors.input_ids[places], last_token[tensors.row_slots[:num_rows]]
        tensors.input_ids[places] = torch.where(found < 0, known, found)
