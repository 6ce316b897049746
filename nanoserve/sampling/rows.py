"""Some rows of a step: settings and indices of the host beside logits of the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def rows_of(matrix: torch.Tensor, rows: np.ndarray) -> Iterator[torch.Tensor]:
    """Some rows of a matrix, to be changed in place; the matrix itself if they are all of it."""
    if len(rows) == len(matrix):
        yield matrix
    else:
        index = tensor_of(rows, matrix)
        part = matrix[index]
        yield part
        matrix[index] = part


def tensor_of(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array.copy()).to(like.device)
