"""CUDA graphs for mixed steps (`capture_mixed_steps`), i.e. steps that contain prompt chunks.

Launched kernel by kernel, such a step of a small model takes the host longer than the GPU. But a
graph has fixed numbers of tokens and of rows, and mixed steps have any number of decode rows and of
chunks of any length. So a graph is captured for a padded number of tokens, with room for
`max_num_seqs` rows:

    tokens    [ a7 | b3 | c0 c1 c2 c3 | 0 0 ]     8, of which the last two are padding

Padding tokens come last and belong to no row: their K and V are written to the dummy block, no
attention program computes them, and their results are never read. The attention kernels read the
numbers of rows and of decode rows from the step's header on the device.

All of this follows from the batch, so ranks that share it choose the same graph. It has not run on
several GPUs.
"""

import numpy as np
import torch

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.cpu_device import Computation, StepOutput
from nanoserve.worker.cuda import Cuda
from nanoserve.worker.cuda_buffers import CudaBuffers
from nanoserve.worker.cuda_graphs import SizedGraphs
from nanoserve.worker.dummy_rows import pack_dummy_step

_SMALLEST = 64  # tokens; a GPU takes as long for fewer


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the numbers of tokens to capture, ascending; the last one is the token budget itself.

    Powers of two, and from 512 on the values halfway between them: while prompts wait, a step has
    as many tokens as its budget, and no padding. For 2048: [64, 128, 256, 512, 768, 1024, 1536,
    2048]. With a budget of one token there are no mixed steps.
    """
    if max_num_batched_tokens == 1:
        return []
    sizes, size = [], _SMALLEST
    while size < max_num_batched_tokens:
        sizes += [size] if size < 512 else [size, size * 3 // 2]
        size *= 2
    return [s for s in sizes if s < max_num_batched_tokens] + [max_num_batched_tokens]


def pad_step(batch: Batch, header: BatchHeader, num_tokens: int, block_size: int) -> None:
    """Pad a step with tokens that belong to no row.

    Real tokens stay in place, and `batch.header` still counts only these. The padding is the same
    on every rank that shares the batch.
    """
    tokens = header.num_tokens
    batch.input_ids[tokens:num_tokens] = 0
    batch.positions[tokens:num_tokens] = 0
    batch.slot_mapping[:, tokens:num_tokens] = np.arange(num_tokens - tokens) % block_size


class MixedProgram:
    """CUDA graphs for mixed steps, i.e. steps in which a sequence computes more than one token.

    `sizes` are the captured token counts, ascending. The largest is captured first so that smaller
    graphs reuse its memory pool. All graphs share one output buffer, because separate buffers would
    use up that pool.
    """

    def __init__(
        self, cuda: Cuda, buffers: CudaBuffers, computation: Computation, sizes: list[int]
    ) -> None:
        self.graphs = SizedGraphs(sizes)
        self._cuda, self._buffers, self._computation = cuda, buffers, computation
        self._hidden: torch.Tensor | None = None  # [sizes[-1], hidden_size]

    def covers(self, batch: Batch, header: BatchHeader) -> bool:
        return header.max_query_len > 1 and header.num_tokens <= self.graphs.sizes[-1]

    def capture(self, *, shows_progress: bool) -> None:
        """Capture all sizes, with a row of two dummy tokens."""
        batch, block_size = self._buffers.new_batch(), self._computation.block_size
        header = pack_dummy_step(batch, np.array([2], dtype=np.int32), block_size)
        pad_step(batch, header, self.graphs.sizes[-1], block_size)
        self._buffers.copy_in(batch, header)
        self._buffers.wait_until_read(batch)
        self.graphs.capture(self._cuda, self.launch, shows_progress=shows_progress)

    def launch(self, num_tokens: int) -> torch.Tensor:
        """Launch what a graph captures: the maximum number of rows, in the longest contexts."""
        num_rows = self._buffers.layout.max_num_rows
        header = BatchHeader(
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_query_len=num_tokens,
            max_context_len=self._computation.max_model_len,
        )
        step = self._buffers.tensors, header, self._buffers.tables(num_rows)
        hidden = self._computation.forward(*step, is_mixed=True)
        if self._hidden is None:  # the largest size comes first, and runs once before its capture
            self._hidden = torch.empty_like(hidden)
        return self._hidden[:num_tokens].copy_(hidden)

    def replay(self, batch: Batch, header: BatchHeader) -> StepOutput:
        size, tensors = self.graphs.size_for(header.num_tokens), self._buffers.tensors
        pad_step(batch, header, size, self._computation.block_size)
        self._buffers.copy_in(batch, header)
        if header.num_pending:
            tensors.fill_in_pending(header, self._computation.last_token)
        return StepOutput(tensors, self.graphs.replay(size))
