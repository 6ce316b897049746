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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanoserve.sampling_params import SamplingParams
from nanoserve.utils.checks import is_int, require, shown

WHOLE, PIECES = "prompt_embeds", "prompt_embeds_pieces"  # keys of a prompt dictionary
_PLACEHOLDER = 0  # the id at the positions of `prompt_embeds`, as in vLLM's outputs
_DTYPES = ("float32", "bfloat16", "float16")


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
        return len(self.indices).to_bytes(8, "little") + self.indices.tobytes() + self.rows.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> "StepEmbeds":
        num_rows = int.from_bytes(content[:8], "little")
        indices = np.frombuffer(content, dtype=np.int64, offset=8, count=num_rows)
        rows = np.frombuffer(bytearray(content[8 + indices.nbytes :]), dtype=np.uint8)
        return cls(indices.copy(), rows.reshape(num_rows, -1))


class PromptEmbedsReader:
    """Reads and checks the embeddings of prompts. dtype, hidden_size: the model's."""

    def __init__(self, dtype: str, hidden_size: int, block_size: int, max_prompt_len: int) -> None:
        self._dtype, self._hidden_size = dtype, hidden_size
        self._block_size, self._max_prompt_len = block_size, max_prompt_len

    def take(self, prompt: Any, params: SamplingParams) -> tuple[Any, PromptEmbeds | None]:
        """Return the prompt without its embeddings, and these; None if it has none.

        `prompt_embeds` is a tensor [num_tokens, hidden_size], or [1, num_tokens, hidden_size]: the
        whole prompt. `prompt_embeds_pieces` is a list of (position, tensor [num_rows,
        hidden_size]): the embeddings at positions of `prompt_token_ids`, whose ids there are not
        used. They are what transformers calls `inputs_embeds`. Raises `ValueError` for a wrong
        shape or dtype, for numbers that are not finite in the model's dtype, and for pieces that
        overlap or lie outside the prompt.
        """
        if not isinstance(prompt, Mapping):
            return prompt, None
        whole, pieces = prompt.get(WHOLE), prompt.get(PIECES)
        rest = {name: value for name, value in prompt.items() if name not in (WHOLE, PIECES)}
        if whole is None and pieces is None:
            return rest, None
        require(
            params.prompt_logprobs is None,
            f"prompt_logprobs={params.prompt_logprobs} needs a prompt of tokens: embeddings have no "
            f"probability",
        )
        if pieces is None:
            require(
                rest.get("prompt_token_ids") is None,
                f"{WHOLE!r} is a whole prompt: for embeddings between token ids, pass "
                f"'prompt_token_ids' and {PIECES!r}",
            )
            rows = self._rows(WHOLE, whole)
            rest["prompt_token_ids"] = [_PLACEHOLDER] * len(rows)
            return rest, self._joined([(0, rows)])
        require(whole is None, f"pass either {WHOLE!r} or {PIECES!r}")
        token_ids = rest.get("prompt_token_ids")
        require(
            token_ids is not None and hasattr(token_ids, "__len__"),
            f"{PIECES!r} needs 'prompt_token_ids' with an id at each of their positions",
        )
        return rest, self._joined(self._read_pieces(pieces, len(token_ids)))

    def _read_pieces(self, pieces: Any, num_tokens: int) -> list[tuple[int, np.ndarray]]:
        """Return the pieces in order of their positions."""
        require(
            isinstance(pieces, (list, tuple)) and len(pieces) > 0,
            f"{PIECES} must be a list of (position, tensor), not {shown(pieces)}",
        )
        read = []
        for index, piece in enumerate(pieces):
            name = f"{PIECES}[{index}]"
            is_pair = isinstance(piece, (list, tuple)) and len(piece) == 2
            require(is_pair and is_int(piece[0]), f"{name} must be (position, tensor)")
            start, rows = int(piece[0]), self._rows(name, piece[1])
            require(
                0 <= start <= num_tokens - len(rows),
                f"{name} has the positions {start} to {start + len(rows) - 1}, but the prompt has "
                f"{num_tokens} token ids, one for each position of a piece",
            )
            read.append((start, rows))
        read.sort(key=lambda piece: piece[0])
        for (start, rows), (after, _) in zip(read, read[1:], strict=False):
            end = start + len(rows)
            require(
                end <= after,
                f"{PIECES} overlap: one has the positions {start} to {end - 1}, and another one "
                f"begins at {after}",
            )
        return read

    def _joined(self, pieces: list[tuple[int, np.ndarray]]) -> PromptEmbeds:
        positions = [np.arange(start, start + len(rows)) for start, rows in pieces]
        content = np.concatenate([rows for _, rows in pieces])  # a copy: the caller may write on
        return PromptEmbeds.of(np.concatenate(positions), content, self._dtype, self._block_size)

    def _rows(self, name: str, tensor: Any) -> np.ndarray:
        """Return a tensor as rows of bytes, in the model's dtype. They may share its memory."""
        import torch

        require(
            isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided,
            f"{name} must be a dense torch.Tensor, not {type(tensor).__name__}",
        )
        kind = str(tensor.dtype).removeprefix("torch.")
        require(kind in _DTYPES, f"{name} has dtype {kind}, which must be one of {list(_DTYPES)}")
        shape, size = tuple(tensor.shape), self._hidden_size
        if len(shape) == 3 and shape[0] == 1:
            tensor = tensor[0]
        require(
            tensor.ndim == 2 and tensor.shape[1] == size and tensor.shape[0] > 0,
            f"{name} has the shape {list(shape)}, but must be [number of tokens, {size}]: the "
            f"model has hidden_size={size}",
        )
        require(
            len(tensor) <= self._max_prompt_len,  # before anything is copied
            f"{name} has {len(tensor)} tokens, more than the {self._max_prompt_len} that a prompt "
            f"may have",
        )
        own = tensor.detach().to("cpu", getattr(torch, self._dtype)).contiguous()
        wrong = torch.nonzero(~torch.isfinite(own))
        if len(wrong):
            row, column = wrong[0].tolist()
            raise ValueError(
                f"{name}[{row}, {column}] is {tensor[row, column].item()}, which is not finite in "
                f"the model's {self._dtype}; {len(wrong)} of {own.numel()} numbers are not"
            )
        return own.view(torch.uint8).numpy()
