"""Exercise: run decode steps by replaying recorded graphs.

`ToyDevice` (in test_exercise.py) stands for a GPU. It has four arrays of integers, one row of a
batch to each place, and a KV cache of one number per slot:

    device.input_ids      [max_rows]
    device.slot_mapping   [max_rows]
    device.context_lens   [max_rows]
    device.block_tables   [max_rows, max_blocks]
    device.block_size     tokens to a block

`device.capture(num_rows)` records a decode step of exactly so many rows and returns a function that
replays it: each row stores its input at its slot, then reads the slots of its context, through its
block table, and computes one number from them. A replay gives an array [num_rows].

As with real graphs:

- What is recorded are the addresses of the arrays. A replay sees what is in them at that time; an
  array that takes another one's place is never seen.
- The array that a replay returns is the same every time, and the next replay overwrites it.
- Capturing takes time and memory: all of it is done before the first step.
- A replay computes all of its rows. Nobody tells it that some of them are not there, and it has no
  test for padding: each row must be one that can be computed, with a context of one token or more.

Block 0 is the dummy block, which no sequence ever owns. All other blocks may belong to somebody.

Complete the class. A step of n rows replays the smallest graph that has n rows or more.

    pytest -x docs/10-cuda-graphs/test_exercise.py
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .test_exercise import ToyDevice


class Row(NamedTuple):
    """One sequence of a decode step."""

    input_id: int
    slot: int  # where its K and V go
    context_len: int  # tokens that it sees, its own included
    block_table: list[int]


class GraphRunner:
    """Captures a graph for each of `sizes`, which ascend, and runs steps with them."""

    def __init__(self, device: "ToyDevice", sizes: list[int]) -> None:
        raise NotImplementedError

    def run(self, rows: list[Row]) -> list[float]:
        """What the step computes for each row; ValueError for more rows than any graph has."""
        raise NotImplementedError
