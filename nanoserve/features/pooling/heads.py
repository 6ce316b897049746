"""Heads that pool: which of a prompt's hidden states are passed on.

    head          reads            passes on, of each chunk
    pool_last     the last token   its row
    pool_first    all tokens       the first row
    pool_mean     all tokens       the sum of the rows, in float64
    pool_all      all tokens       all rows

A row is what the model makes of a hidden state: the state itself, or scores of classes
(`nanoserve.models.pooling`). The heads keep no state, so preemptions and steps that are rolled back
need no care here: `nanoserve.features.pooling.collector` joins the chunks.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.engine.executor import SlotUpdate
from nanoserve.sampling.host_copies import to_host

HEAD_OF = {"LAST": "pool_last", "CLS": "pool_first", "MEAN": "pool_mean", "ALL": "pool_all"}


class Pooled(NamedTuple):
    """The results of a head, which may not have been computed yet.

    bounds: the first output of each chunk, and the number of outputs. rows: of the chunks.
    """

    bounds: list[int]
    rows: Tensor


class AllRows:
    """Passes on the rows of all tokens that it reads; also the head of last tokens."""

    def __init__(self, num_slots: int) -> None:
        """Prepare nothing: there is no state by slot."""

    def set_slot(self, change: SlotUpdate) -> None:
        """Do nothing: the head's name is all that a sequence chooses."""

    def __call__(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        slots: np.ndarray,
        compute_logits: Callable[[Tensor], Tensor | None],
    ) -> Pooled | None:
        rows = compute_logits(hidden)
        if rows is None:  # on another rank than 0
            return None
        # A sequence has one chunk in a step, so a chunk ends where the slot changes.
        ends = np.flatnonzero(np.diff(slots)) + 1
        bounds = [0, *ends.tolist(), len(slots)]
        return Pooled(bounds, to_host(self.choose(rows, bounds)))

    def choose(self, rows: Tensor, bounds: list[int]) -> Tensor:
        """Return what is passed on of `rows`, [num_outputs, size]."""
        return rows

    def collect(self, made: Pooled) -> dict[int, np.ndarray]:
        """Return the rows of each chunk, by the chunk's first output."""
        rows = made.rows.numpy()
        return {first: rows[first:end] for first, end in pairwise(made.bounds)}


class FirstRows(AllRows):
    """Passes on the first row of each chunk."""

    def choose(self, rows: Tensor, bounds: list[int]) -> Tensor:
        return torch.stack([rows[first] for first in bounds[:-1]])

    def collect(self, made: Pooled) -> dict[int, np.ndarray]:
        return dict(zip(made.bounds, made.rows.numpy(), strict=False))


class SummedRows(FirstRows):
    """Passes on the sum of each chunk; in float64, so that chunks hardly change the mean."""

    def choose(self, rows: Tensor, bounds: list[int]) -> Tensor:
        parts = [rows[first:end] for first, end in pairwise(bounds)]
        return torch.stack([part.sum(0, dtype=torch.float64) for part in parts])
