"""Exercise: pack a step.

The scheduler has decided which sequences run and how many tokens of each. Complete `pack`, which
writes that down as flat arrays, one sequence after the other, without padding. All arrays are
int32, also those that are empty:

    input_ids      [num_tokens]     the new tokens: token_ids[num_computed : num_computed + num_new]
    positions      [num_tokens]     where each stands in its sequence; the first token is at 0
    slot_mapping   [num_tokens]     where its K and V go: block * block_size + offset, where the
                                    block table lists which block holds a position
    cu_seqlens_q   [num_rows + 1]   where each row's tokens begin, and where the last one's end
    context_lens   [num_rows]       tokens that the row attends to, the new ones included
    output_rows    [at most num_rows]   the places in `input_ids` whose logits a next token is
                                    sampled from: the last token of each row that this step brings
                                    up to its last known token, and none of any other row

It is easy with a loop over tokens. A step may have thousands of them and must be packed in less
time than a small model takes to run: then try to have no loop but the one over rows.

    pytest -x docs/08-packed-batch/test_exercise.py
"""

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """What the scheduler says of one sequence."""

    token_ids: list[int]  # all that are known: the prompt and what was sampled
    num_computed: int  # of which so many have their K and V in the cache
    num_new: int  # and so many are computed now, at least one
    block_table: list[int]


def pack(rows: list[Row], block_size: int) -> dict[str, np.ndarray]:
    """The fields above, by their names."""
    raise NotImplementedError
