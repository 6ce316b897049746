"""Copies of KV blocks between the KV cache and the host's memory, as an input of a step."""

from typing import NamedTuple

import numpy as np


class KVTransfers(NamedTuple):
    """Copies of KV blocks between the KV cache and the host's places, before the model runs.

    A copy to the host comes before every copy to the device, so that a block may leave and be
    filled again in one step.
    """

    to_host: list[tuple[int, int]]  # (block, place)
    to_device: list[tuple[int, int]]  # (place, block)

    def after(self, others: "KVTransfers | None") -> "KVTransfers":
        """Return the copies of a step that has these and, before them, `others`."""
        if others is None:
            return self
        to_host, to_device = others
        return KVTransfers([*to_host, *self.to_host], [*to_device, *self.to_device])

    def to_bytes(self) -> bytes:
        """Return the copies for other ranks, which copy their own shares of the same blocks."""
        pairs = np.array([*self.to_host, *self.to_device], dtype=np.int32)
        return len(self.to_host).to_bytes(4, "little") + pairs.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> "KVTransfers":
        num_to_host = int.from_bytes(content[:4], "little")
        rows = np.frombuffer(content, dtype=np.int32, offset=4).reshape(-1, 2).tolist()
        pairs = [(source, target) for source, target in rows]
        return cls(pairs[:num_to_host], pairs[num_to_host:])
