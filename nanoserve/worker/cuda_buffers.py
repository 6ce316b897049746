"""The batch on a GPU: one copy in, at addresses that graphs know."""

from collections import deque
from typing import Any

import numpy as np
import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader, BatchLayout
from nanoserve.worker.batch_tensors import BatchTensors
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.dummy_rows import pack_dummy_step


class CudaBuffers:
    """The device's copy of a step, and its block tables in rows of full width.

    Each step is copied over the one before: on one stream, so when that has been read.
    """

    def __init__(self, cuda: Cuda, layout: BatchLayout) -> None:
        self.layout, self._cuda = layout, cuda
        self._memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=cuda.device)
        self.tensors = BatchTensors(layout, self._memory)
        shape = (layout.num_groups, layout.max_num_rows, layout.max_blocks_per_row)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=cuda.device)
        self._copied: dict[int, Any] = {}  # by address of a batch: the event behind its last copy
        self._own: deque[Batch] = deque()

    def copy_in(self, batch: Batch, header: BatchHeader) -> torch.Tensor:
        """Copy a step, and return its block tables. They have the one stride that graphs know."""
        used = batch.num_bytes_used(header)
        host = torch.from_numpy(batch.memory)[:used]
        self._memory[:used].copy_(host, non_blocking=True)
        address = batch.memory.ctypes.data
        if address not in self._copied:
            self._copied[address] = self._cuda.event()
        self._copied[address].record()
        packed = self.tensors.packed_tables(header)
        self._tables[:, : header.num_rows, : header.table_width].copy_(packed)
        return self.tables(header.num_rows)

    def tables(self, num_rows: int) -> torch.Tensor:
        """Return the tables of so many rows, [num_groups, num_rows, max_blocks_per_row]."""
        return self._tables[:, :num_rows]

    def wait_until_read(self, batch: Batch) -> None:
        """Wait until the last copy of `batch` is over."""
        copied = self._copied.get(batch.memory.ctypes.data)
        if copied is not None:
            copied.synchronize()

    def own_copy(self, batch: Batch, header: BatchHeader) -> Batch:
        """Return a step where it may be changed: in `batch`, other ranks may still read it."""
        if not self._own:  # as many as steps under way
            self._own.extend((self.new_batch(), self.new_batch()))
        own, used = self._own[0], batch.num_bytes_used(header)
        self._own.rotate()
        self.wait_until_read(own)
        own.memory[:used] = batch.memory[:used]
        return own

    def new_batch(self) -> Batch:
        """Return a batch in page-locked memory of its own."""
        memory = self._cuda.pinned(self.layout.num_bytes, dtype=torch.uint8)
        return Batch(self.layout, memory.numpy())

    def copy_in_dummies(self, num_rows: int, query_len: int, block_size: int) -> None:
        """Copy rows of `query_len` tokens each, for graphs to be recorded with."""
        batch = self.new_batch()
        lengths = np.full(num_rows, query_len, dtype=np.int32)
        self.copy_in(batch, pack_dummy_step(batch, lengths, block_size))
        self.wait_until_read(batch)
