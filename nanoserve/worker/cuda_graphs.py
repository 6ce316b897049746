"""CUDA graphs: a decode step is recorded once and replayed with one call.

A step of a small model launches some hundred kernels of a few microseconds each; launched one by
one from Python, the GPU waits for the next one most of the time. A recorded graph has fixed
addresses and a fixed number of rows: so every graph reads the one device buffer that batches are
copied to, and a batch between two recorded sizes is filled up with dummy rows.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from tqdm import tqdm

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.worker.cuda import Cuda


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture, ascending; the last one is `max_num_seqs` itself.

    Powers of two up to 16, then every 16 up to 256, then every 64: a step computes at most a few
    rows for nobody, and 256 sequences take 20 graphs. For 20: [1, 2, 4, 8, 16, 20].
    """
    sizes = [1, 2, 4, 8, *range(16, 256, 16), *range(256, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def append_dummy_rows(
    batch: Batch, header: BatchHeader, num_new_tokens: np.ndarray, block_size: int
) -> BatchHeader:
    """Add rows that belong to nobody, of so many tokens each; returns the header that counts them.

    They are real rows: tokens from position 0 on, in the dummy block 0, with a context of their
    own tokens. So no kernel has to test for padding, and whatever they compute is never read.
    `batch.header` keeps counting the real rows only.
    """
    rows, tokens = header.num_rows, header.num_tokens
    all_rows, all_tokens = rows + len(num_new_tokens), tokens + int(num_new_tokens.sum())
    if rows == 0:
        batch.cu_seqlens_q[0] = 0
    ends = np.cumsum(num_new_tokens)
    batch.cu_seqlens_q[rows + 1 : all_rows + 1] = batch.cu_seqlens_q[rows] + ends
    batch.context_lens[rows:all_rows] = num_new_tokens
    batch.row_slots[rows:all_rows] = 0
    batch.block_tables(all_rows, header.table_width)[rows:] = 0
    positions = np.arange(all_tokens - tokens) - np.repeat(ends - num_new_tokens, num_new_tokens)
    batch.input_ids[tokens:all_tokens] = 0
    batch.positions[tokens:all_tokens] = positions
    batch.slot_mapping[tokens:all_tokens] = positions % block_size
    longest = int(num_new_tokens.max(initial=0))
    return header._replace(
        num_rows=all_rows,
        num_tokens=all_tokens,
        num_decode_rows=header.num_decode_rows + int((num_new_tokens == 1).sum()),
        max_query_len=max(header.max_query_len, longest),
        max_context_len=max(header.max_context_len, longest),
    )


class DecodeGraphs:
    """One captured forward pass for each of `sizes`, of rows with `query_len` tokens each."""

    def __init__(self, sizes: list[int], query_len: int = 1) -> None:
        self.sizes, self.query_len = sizes, query_len
        self._replays: dict[int, Callable[[], None]] = {}
        self.outputs: dict[int, torch.Tensor] = {}  # by size, overwritten by each replay

    def covers(self, header: BatchHeader) -> bool:
        """Whether a batch can be replayed: each of its rows has `query_len` tokens, none is more.

        A row of the last token of a prompt looks like any decode row, and is one.
        """
        same_length = header.num_tokens == header.num_rows * self.query_len
        return (
            same_length
            and header.max_query_len == self.query_len
            and header.num_rows <= self.sizes[-1]
        )

    def size_for(self, num_rows: int) -> int:
        """The smallest captured size that holds `num_rows`."""
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def capture(
        self, cuda: Cuda, forward: Callable[[int], torch.Tensor], *, shows_progress: bool = True
    ) -> None:
        """Record `forward(num_rows)`, which returns a tensor, at every size.

        The largest first: the smaller ones then fit into the memory that it has left behind.
        """
        pool = cuda.graph_pool()
        sizes = self.sizes[::-1]
        for size in tqdm(sizes, "Capturing CUDA graphs", disable=not shows_progress):
            replay, output = cuda.capture(lambda size=size: forward(size), pool)
            self._replays[size], self.outputs[size] = replay, output

    def replay(self, size: int) -> torch.Tensor:
        """Launch the graph of `size`; its output is overwritten by the next replay."""
        self._replays[size]()
        return self.outputs[size]
