"""Exercise: many adapters in one batch.

A packed batch is `x`, [rows, inputs]: the tokens of all sequences, one after the other, whatever
their adapters. `adapter_of[i]` is the number of row i's adapter, 0 for none. The result is
[rows, outputs]: for each row W x, and for a row with an adapter scaling B A x in addition.

`segments` sorts: it returns the rows' indices in the order of their adapters (within an adapter in
the order of the batch), and for each adapter that is present, by its number, the slice of this
order that holds its rows. Rows without an adapter come first, and have no entry.

`batched_lora` computes the result. All matrix products go through `product(a, b)`, which is a @ b
and counts the calls. The rules:

1. One product with the weight, for all rows together.
2. Two products for each adapter that is present, on its rows alone, and through the rank: never
   B A, which is as large as the weight. With p adapters there are 1 + 2 p calls.
3. Adapters may have different ranks.
4. Rows without an adapter are bit for bit the result of the weight alone: nothing is added to them.
5. The arguments are not changed.

Test it with `pytest -x docs/24-adapters-and-embeddings/test_exercise.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Adapter:
    a: np.ndarray  # [rank, inputs]
    b: np.ndarray  # [outputs, rank]
    scaling: float


def segments(adapter_of: np.ndarray) -> tuple[np.ndarray, dict[int, slice]]:
    raise NotImplementedError


def batched_lora(
    x: np.ndarray,
    weight: np.ndarray,
    adapters: dict[int, Adapter],
    adapter_of: np.ndarray,
    product: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """weight: [outputs, inputs]. adapters: by number; not all of them need be present."""
    raise NotImplementedError
