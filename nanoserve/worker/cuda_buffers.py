"""The batch's device buffers, at the fixed addresses that graphs use."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    Each step overwrites the previous one. Both run on one stream, so that has been read by then.
    """

    def __init__(self, cuda: Cuda, layout: BatchLayout) -> None:
        self.layout, self._cuda = layout, cuda
        self._memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=cuda.device)
        self.tensors = BatchTensors(layout, self._memory)
        shape = (layout.num_groups, layout.max_num_rows, layout.max_blocks_per_row)
        self._tables = torch.zeros(shape, dtype=torch.int32, device=cuda.device)
        self._copied: dict[int, Any] = {}  # by batch address: the event after its last copy
        self._own: deque[Batch] = deque()
        self._send: Callable[[Batch], None] | None = None

    def copy_in(self, batch: Batch, header: BatchHeader) -> torch.Tensor:
        """Copy a step to the device; return its block tables, with the stride that graphs use."""
        used = batch.num_bytes_used(header)
        host = torch.from_numpy(batch.memory)[:used]
        self._memory[:used].copy_(host, non_blocking=True)
        address = batch.memory.ctypes.data
        if address not in self._copied:
            self._copied[address] = self._cuda.event()
        self._copied[address].record()
        packed = self.tensors.packed_tables(header)
        self._tables[:, : header.num_rows, : header.table_width].copy_(packed)
        if self._send is not None:
            self._send(batch)
        return self.tables(header.num_rows)

    @contextmanager
    def sending(self, send: Callable[[Batch], None]) -> Iterator[None]:
        """Call `send` with each step that is copied inside the context, as it was padded."""
        self._send = send
        try:
            yield
        finally:
            self._send = None

    def tables(self, num_rows: int) -> torch.Tensor:
        """Return the tables of `num_rows` rows, [num_groups, num_rows, max_blocks_per_row]."""
        return self._tables[:, :num_rows]

    def wait_until_read(self, batch: Batch) -> None:
        """Wait until the last copy of `batch` has finished."""
        copied = self._copied.get(batch.memory.ctypes.data)
        if copied is not None:
            copied.synchronize()

    def own_copy(self, batch: Batch, header: BatchHeader) -> Batch:
        """Return a copy of a step that may be modified: other ranks may still read `batch`."""
        if not self._own:  # one for each step in flight
            self._own.extend((self.new_batch(), self.new_batch()))
        own, used = self._own[0], batch.num_bytes_used(header)
        self._own.rotate()
        self.wait_until_read(own)
        own.memory[:used] = batch.memory[:used]
        return own

    def new_batch(self) -> Batch:
        """Return a batch in new page-locked memory."""
        memory = self._cuda.pinned(self.layout.num_bytes, dtype=torch.uint8)
        return Batch(self.layout, memory.numpy())

    def copy_in_dummies(self, num_rows: int, query_len: int, block_size: int) -> None:
        """Copy dummy rows of `query_len` tokens each to the device, as inputs for a capture."""
        batch = self.new_batch()
        lengths = np.full(num_rows, query_len, dtype=np.int32)
        self.copy_in(batch, pack_dummy_step(batch, lengths, block_size))
        self.wait_until_read(batch)
