"""Subsets of a step's rows: settings and indices on the host, logits on the device."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nanoserve.engine.executor import TokenMask
from nanoserve.sampling.host_copies import to_device

if TYPE_CHECKING:
    from nanoserve.sampling.slot_state import SlotState


class Rows(NamedTuple):
    """Some or all rows of a step, while they are processed from logits to tokens.

    settings: [num_rows] of `SETTINGS`. slots, positions: [num_rows], the row's slot and the
        position that its new token will have.
    tensors: the batch on the device, if these are all rows of the step. errors: by row of the step,
    why it has no token: see `fail`. outputs: [num_rows], the index of each row in the step; None
    for all rows. places: [num_rows], for a stage: the index of each row in the stage's logits.
    states: by row, the state of its sequence for stages; None if no stage needs it. masks: by row,
    its token mask and the row's index in that mask, or None.
    """

    settings: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    tensors: Any
    errors: dict[int, Exception]
    outputs: np.ndarray | None = None
    places: np.ndarray | None = None
    states: "Sequence[SlotState | None]" = ()
    masks: Sequence[tuple[TokenMask, int] | None] = ()

    def take(self, index: np.ndarray) -> "Rows":
        """Return some of the rows, whose logits are copied into a new matrix."""
        return Rows(
            self.settings[index],
            self.slots[index],
            self.positions[index],
            tensors=None,
            errors=self.errors,
            outputs=index if self.outputs is None else self.outputs[index],
            states=[self.states[i] for i in index] if self.states else (),
            masks=[self.masks[i] for i in index] if self.masks else (),
        )

    def among(self, index: np.ndarray) -> "Rows":
        """Return some of the rows, in their order, whose logits stay in the common matrix."""
        places = index if self.places is None else self.places[index]
        if len(index) == len(self.settings):
            return self._replace(places=places)
        return self.take(index)._replace(places=places)

    def part(self, logits: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return a context with these rows' logits, [num_rows, vocab_size], to change in place."""
        return rows_of(logits, self.places)

    def fail(self, row: int, error: Exception) -> None:
        """End the request of one of these rows with `error`."""
        self.errors[row if self.outputs is None else int(self.outputs[row])] = error


@contextmanager
def rows_of(matrix: torch.Tensor, rows: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield some rows of a matrix, to change in place; the matrix itself if these are all rows."""
    if len(rows) == len(matrix):
        yield matrix
    else:
        index = tensor_of(rows, matrix)
        part = matrix[index]
        yield part
        matrix[index] = part


def tensor_of(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return an array as a tensor on the device of `like`; on a GPU the copy is asynchronous."""
    (tensor,) = to_device(like.device, array.copy())
    return tensor
