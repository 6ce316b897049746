"""Prompt embeddings are vectors that take the place of token embeddings in a prompt.

They are soft prompts, or what an encoder makes of an image. A prompt has *placeholder* ids at their
positions, so that all else counts tokens as usual. K and V depend on the vectors, not on the ids of
the placeholders; so the prefix cache compares, in addition to ids, a hash of the vectors in a block
(`PromptEmbeds.key_of_block`).

    token ids    [ 5 | 0 | 0 | 7 | 9 ]      0: placeholders
    positions        [ 1 | 2 ]
    rows             [ a | b ]              a, b: vectors of hidden_size numbers
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, eq=False)
class PromptEmbeds:
    """The embeddings of a prompt, in the model's dtype. Nothing changes them.

    positions: int64 [num_rows], ascending. rows: uint8 [num_rows, bytes of a row], as numpy has no
    bfloat16. block_keys: by index of a KV block, SHA-256 of its embeddings and their positions.
    """

    positions: np.ndarray
    rows: np.ndarray
    block_keys: dict[int, bytes]

    @classmethod
    def of(
        cls, positions: np.ndarray, rows: np.ndarray, dtype: str, block_size: int
    ) -> "PromptEmbeds":
        """Hash the rows of each block; equal vectors at equal places give equal keys."""
        blocks = positions // block_size
        kind, keys = f"{dtype} {rows.shape[1]}\n".encode(), {}
        for block in np.unique(blocks).tolist():
            first, end = np.searchsorted(blocks, (block, block + 1))
            digest = hashlib.sha256(kind)
            digest.update((positions[first:end] - block * block_size).astype("<i8").tobytes())
            digest.update(rows[first:end].tobytes())
            keys[block] = digest.digest()
        return cls(positions, rows, keys)

    def key_of_block(self, index: int) -> bytes:
        """Return the hash of the embeddings in a KV block; b"" if it has none."""
        return self.block_keys.get(index, b"")

    def between(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions in [start, end), and their rows."""
        first, last = np.searchsorted(self.positions, (start, end))
        return self.positions[first:last], self.rows[first:last]

    def next_position(self, start: int) -> int | None:
        """Return the first position from `start` on; None if there is none."""
        index = int(np.searchsorted(self.positions, start))
        return int(self.positions[index]) if index < len(self.positions) else None

    def without_placeholders(self, token_ids: list[int]) -> list[int]:
        """Return the ids of `token_ids`, the prompt's, that stand for tokens."""
        is_token = np.ones(len(token_ids), dtype=bool)
        is_token[self.positions] = False
        return np.array(token_ids)[is_token].tolist()


class StepEmbeds(NamedTuple):
    """The embeddings of a step.

    indices: int64 [num_rows], the tokens of the batch that have them. rows: uint8 [num_rows, bytes
    of a row], as in `PromptEmbeds`.
    """

    indices: np.ndarray
    rows: np.ndarray

    def to_bytes(self) -> bytes:
        """Return the embeddings for other ranks."""
        return (
            len(self.indices).to_bytes(8, "little") + self.indices.tobytes() + self.rows.tobytes()
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> "StepEmbeds":
        num_rows = int.from_bytes(content[:8], "little")
        indices = np.frombuffer(content, dtype=np.int64, offset=8, count=num_rows)
        rows = np.frombuffer(bytearray(content[8 + indices.nbytes :]), dtype=np.uint8)
        return cls(indices.copy(), rows.reshape(num_rows, -1))
