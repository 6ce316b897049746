"""Exercise: run decode steps by replaying captured graphs.

`ToyDevice` (in test_exercise.py) stands for a GPU. It has four arrays of integers, with one entry
per row of a batch, and a KV cache of one number per KV slot:

    device.input_ids      [max_rows]
    device.slot_mapping   [max_rows]
    device.context_lens   [max_rows]
    device.block_tables   [max_rows, max_blocks]
    device.block_size     tokens per block

`device.capture(num_rows)` captures a decode step of exactly `num_rows` rows and returns a function
that replays it: each row stores its input at its KV slot, then reads the KV slots of its context,
through its block table, and computes one number from them. A replay returns an array [num_rows].

As with real graphs:

- A graph contains the addresses of the arrays. A replay reads their content at that time; an array
  that replaces another one is never read.
- The array that a replay returns is the same every time, and the next replay overwrites it.
- Capturing takes time and memory: all graphs are captured before the first step.
- A replay computes all of its rows and has no special case for padding: each row must be valid,
  with a context of one token or more.

Block 0 is the dummy block, which no sequence ever owns. All other blocks may belong to a sequence.

Complete the class. A step of n rows replays the smallest graph that has n rows or more.

    pytest -x docs/10-cuda-graphs/test_exercise.py
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .test_exercise import ToyDevice


class Row(NamedTuple):
    """One sequence of a decode step."""

    input_id: int
    slot: int  # KV slot of its K and V
    context_len: int  # tokens that it attends to, its own included
    block_table: list[int]


class GraphRunner:
    """Captures a graph for each of `sizes`, which are ascending, and runs steps with them."""

    def __init__(self, device: "ToyDevice", sizes: list[int]) -> None:
        raise NotImplementedError

    def run(self, rows: list[Row]) -> list[float]:
        """Return the result of each row; raises ValueError for more rows than any graph has."""
        raise NotImplementedError
