"""The adapters of a step's rows, as an input of the step."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class AdapterLoad(NamedTuple):
    """An adapter to copy to a place, before the model runs.

    weights: by the name of a linear layer its matrices A [rank, inputs] and B [rank, outputs],
        tensors of the host; None in other processes than rank 0's.
    path: a file with these tensors, for the other processes; None with one rank.
    """

    place: int
    weights: Mapping[str, tuple[Any, Any]] | None
    path: str | None = None


class AdapterRows(NamedTuple):
    """The adapters of a step.

    loads: adapters that are not in their places yet. places: int32, by row of the batch, the place
    of its adapter, or -1 for none.
    """

    loads: list[AdapterLoad]
    places: np.ndarray

    def to_bytes(self) -> bytes:
        """Return the adapters for other ranks, which read the files of those to load."""
        loads = json.dumps([[load.place, load.path] for load in self.loads]).encode()
        return len(loads).to_bytes(4, "little") + loads + self.places.astype(np.int32).tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> "AdapterRows":
        end = 4 + int.from_bytes(content[:4], "little")
        loads = [AdapterLoad(place, None, path) for place, path in json.loads(content[4:end])]
        return cls(loads, np.frombuffer(content, dtype=np.int32, offset=end))
