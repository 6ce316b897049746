"""Exercise: pack a step.

The scheduler has decided which sequences run and how many tokens of each. Complete `pack`, which
stores this in flat arrays, one sequence after the other, without padding. All arrays are int32,
also those that are empty:

    input_ids      [num_tokens]     the new tokens: token_ids[num_computed : num_computed + num_new]
    positions      [num_tokens]     the position of each in its sequence; the first token is at 0
    slot_mapping   [num_tokens]     the KV slot of each: block * block_size + offset, where the
                                    block table lists which block holds a position
    cu_seqlens_q   [num_rows + 1]   where each row's tokens begin, and where the last row's end
    context_lens   [num_rows]       tokens that the row attends to, the new ones included
    output_rows    [at most num_rows]   the indices in `input_ids` of the tokens from whose logits a
                                    next token is sampled: the last token of each row that catches
                                    up with its last known token in this step, and none of any
                                    other row

It is easy with a loop over tokens. A step may have thousands of them and must be packed in less
time than a small model takes to run. So then try to use no loop except the one over rows.

    pytest -x docs/08-packed-batch/test_exercise.py
"""

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """The scheduler's decision for one sequence."""

    token_ids: list[int]  # all known tokens: the prompt and the sampled tokens
    num_computed: int  # tokens whose K and V are in the cache
    num_new: int  # tokens that this step computes, at least one
    block_table: list[int]


def pack(rows: list[Row], block_size: int) -> dict[str, np.ndarray]:
    """Return the fields above by name."""
    raise NotImplementedError
