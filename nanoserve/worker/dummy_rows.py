"""Dummy rows pad a batch to the size of a graph, or make up a whole step.

They are valid rows: tokens from position 0 on, in dummy block 0, with a context of their own
tokens. So no kernel has to test for padding, and their results are never read.
"""

import numpy as np

from nanoserve.engine.batch import Batch
from nanoserve.engine.batch_layout import BatchHeader
from nanoserve.engine.block_manager import blocks_needed


def append_dummy_rows(
    batch: Batch, header: BatchHeader, num_new_tokens: np.ndarray, block_size: int
) -> BatchHeader:
    """Add a row for each of `num_new_tokens`, and return the header that counts them.

    `batch.header` still counts only the real rows, and these stay in place, except that the block
    tables of several groups are stored one after the other and move. With several groups, no other
    rank may read the batch: see `CudaBuffers.own_copy`.
    """
    rows, tokens = header.num_rows, header.num_tokens
    all_rows, all_tokens = rows + len(num_new_tokens), tokens + int(num_new_tokens.sum())
    if rows == 0:
        batch.cu_seqlens_q[0] = 0
    ends = np.cumsum(num_new_tokens)
    batch.cu_seqlens_q[rows + 1 : all_rows + 1] = batch.cu_seqlens_q[rows] + ends
    batch.context_lens[rows:all_rows] = num_new_tokens
    batch.row_slots[rows:all_rows] = 0
    tables = batch.block_tables(all_rows, header.table_width)
    if batch.layout.num_groups > 1:
        tables[:, :rows] = batch.block_tables(rows, header.table_width).copy()
    tables[:, rows:] = 0
    positions = np.arange(all_tokens - tokens) - np.repeat(ends - num_new_tokens, num_new_tokens)
    batch.input_ids[tokens:all_tokens] = 0
    batch.positions[tokens:all_tokens] = positions
    batch.slot_mapping[:, tokens:all_tokens] = positions % block_size
    longest = int(num_new_tokens.max(initial=0))
    return header._replace(
        num_rows=all_rows,
        num_tokens=all_tokens,
        num_decode_rows=header.num_decode_rows + int((num_new_tokens == 1).sum()),
        max_query_len=max(header.max_query_len, longest),
        max_context_len=max(header.max_context_len, longest),
    )


def pack_dummy_step(
    batch: Batch,
    num_new_tokens: np.ndarray,
    block_size: int,
    num_sampled: int = 0,
    max_context_len: int = 0,
) -> BatchHeader:
    """Write a step of dummy rows only into `batch`, and return its header.

    num_new_tokens: ascending, since rows of one token come first. num_sampled: the number of
    tokens, counted from the last, for which logits are computed. max_context_len: a lower bound of
    the header's value, by which kernels decide how to split their work.
    """
    width = blocks_needed(int(num_new_tokens.max()), block_size)
    header = append_dummy_rows(batch, BatchHeader(table_width=width), num_new_tokens, block_size)
    header = header._replace(
        step=batch.step,
        num_outputs=num_sampled,
        num_sampled=num_sampled,
        max_context_len=max(header.max_context_len, max_context_len),
    )
    batch.output_rows[:num_sampled] = np.arange(header.num_tokens - num_sampled, header.num_tokens)
    batch.output_slots[:num_sampled] = np.arange(num_sampled) % len(num_new_tokens)
    batch.layout.views(batch.memory, np.int32)["header"][:] = header
    return header
