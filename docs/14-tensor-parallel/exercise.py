"""Exercise: which rows a rank keeps, and a ring all-reduce.

Complete two functions.

`rows_of` returns which rows of a checkpoint's tensors one rank keeps, for a fused column-parallel
linear such as q, k and v. `outputs` has the number of rows of each tensor, `num_slices` the number
of different slices into which it is split. Usually that is the number of ranks, and rank r keeps
slice r. It may be less where there are fewer KV heads than ranks; the number of ranks is then a
multiple of it, and neighbouring ranks keep the same slice: with four ranks and two slices, ranks 0
and 1 keep the first one, ranks 2 and 3 the second.

`ring_all_reduce` adds up one vector per rank; at the end every rank has the sum, in an array of its
own. All vectors are equally long, and their length is a multiple of the number of ranks. Ranks
form a ring, and the only way to communicate is `ring.send_right(pieces)`: each rank sends one
array to its right neighbour (rank 0 to rank 1, the last one to rank 0), and the call returns what
each rank received, by rank. The ring counts. With p ranks and vectors of n values you may call it
2 (p - 1) times, and no rank may send more than 2 (p - 1) n / p values in total: so no rank can
send a whole vector every time. The vectors that you are given must not be modified.

    pytest -x docs/14-tensor-parallel/test_exercise.py
"""

from collections.abc import Mapping
from typing import Protocol

import numpy as np


class Ring(Protocol):
    def send_right(self, pieces: list[np.ndarray]) -> list[np.ndarray]:
        """One array from each rank -> the one that each rank received."""


def rows_of(
    outputs: Mapping[str, int], num_slices: Mapping[str, int], rank: int, size: int
) -> dict[str, range]:
    """The rows of each tensor that `rank` of `size` ranks keeps."""
    raise NotImplementedError


def ring_all_reduce(vectors: list[np.ndarray], ring: Ring) -> list[np.ndarray]:
    """The sum of `vectors`, each [n], once for every rank."""
    raise NotImplementedError
