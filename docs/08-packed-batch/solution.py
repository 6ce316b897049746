"""A solution of `exercise.py`."""

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """The scheduler's decision for one sequence."""

    token_ids: list[int]
    num_computed: int
    num_new: int
    block_table: list[int]


def pack(rows: list[Row], block_size: int) -> dict[str, np.ndarray]:
    """Join lists row by row; the rest is arithmetic on whole arrays."""
    num_new = np.array([row.num_new for row in rows], dtype=np.int32)
    computed = np.array([row.num_computed for row in rows], dtype=np.int32)
    num_known = np.array([len(row.token_ids) for row in rows], dtype=np.int32)
    input_ids: list[int] = []
    for row in rows:
        input_ids += row.token_ids[row.num_computed : row.num_computed + row.num_new]

    ends = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(num_new, out=ends[1:])
    row_of_token = np.repeat(np.arange(len(rows)), num_new)
    # Token i of the batch is token i - ends[row] of its row.
    positions = np.arange(len(input_ids), dtype=np.int32) + (computed - ends[:-1])[row_of_token]

    # All tables concatenated: a row's own begins after those of the rows before it.
    tables = np.concatenate([np.array(row.block_table, dtype=np.int32) for row in rows])
    lengths = np.array([len(row.block_table) for row in rows])
    blocks = tables[(np.cumsum(lengths) - lengths)[row_of_token] + positions // block_size]
    return {
        "input_ids": np.array(input_ids, dtype=np.int32),
        "positions": positions,
        "slot_mapping": (blocks * block_size + positions % block_size).astype(np.int32),
        "cu_seqlens_q": ends,
        "context_lens": computed + num_new,
        "output_rows": ends[1:][computed + num_new == num_known] - 1,
    }
