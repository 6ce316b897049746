"""States of a fixed size for each running sequence, for layers that keep no K and V of each token.

A running sequence keeps its *slot* (`nanoserve.engine.slot_table`), so its states stay in place. A
row that starts at position 0 starts from zeros, whatever its slot held: a new sequence, and one
that is computed again after a preemption. Any other row continues where the last step ended, so
such a model has no prefix cache and no draft tokens (`nanoserve.features.recurrent_options`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionMetadata
from nanoserve.attention.kv_cache import KVCache


@dataclass(frozen=True)
class RecurrentStateSpec:
    """The states that a layer keeps for each slot, on one rank. A layer declares them.

    A module declares them as its attribute `state_spec`; the worker then allocates a
    `RecurrentState`, and passes it to the layer in place of a KV cache.

    layer: index of the layer in the model. shapes: by name, of the state of one slot, in float32.
    """

    layer: int
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def bytes_per_slot(self) -> int:
        return 4 * sum(math.prod(shape) for shape in self.shapes.values())

    def allocate(
        self, num_slots: int, zeros: Callable[..., Tensor] = torch.zeros
    ) -> "RecurrentState":
        """Allocate the states of `num_slots` slots, which include one for dummy rows."""
        shapes = {name: (num_slots, *shape) for name, shape in self.shapes.items()}
        return RecurrentState(
            {name: zeros(shape, dtype=torch.float32) for name, shape in shapes.items()}
        )


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """The states of one layer, by name: float32 [num_slots, ...], the last one for dummy rows."""

    states: dict[str, Tensor]
    group: int = 0  # like a KV cache's: any group's metadata will do

    def load(self, name: str, metadata: AttentionMetadata) -> Tensor:
        """Return the state of each row, [num_rows, ...]: zeros for one that starts at position 0.

        A slot may hold anything before, even NaN, so it is not multiplied by zero.
        """
        slots, is_new = self._rows(metadata)
        rows = self.states[name].index_select(0, slots)
        return rows.masked_fill_(is_new.view(-1, *[1] * (rows.dim() - 1)), 0.0)

    def store(self, name: str, metadata: AttentionMetadata, rows: Tensor) -> None:
        """Replace the state of each row: [num_rows, ...]."""
        self.states[name].index_copy_(0, self._rows(metadata)[0], rows)

    def fill_(self, value: float) -> None:
        for state in self.states.values():
            state.fill_(value)

    def _rows(self, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """Return the entries of a step's rows, int64, and which rows start at position 0.

        The last entry is for dummy rows. Their slot may be that of a sequence, but no sequence has
        the first place of the dummy block, where they store their first token.
        """
        if "recurrent_state" not in metadata.scratch:
            if metadata.row_slots is None:
                raise ValueError("recurrent states need the slots of the rows: set row_slots")
            first = metadata.cu_seqlens_q[:-1].long()
            is_dummy = metadata.slot_mapping[first] == 0
            last = len(next(iter(self.states.values()))) - 1
            entries = metadata.row_slots.long().masked_fill(is_dummy, last)
            metadata.scratch["recurrent_state"] = entries, metadata.positions[first] == 0
        return metadata.scratch["recurrent_state"]


LayerCache = KVCache | RecurrentState  # what a layer keeps between steps
