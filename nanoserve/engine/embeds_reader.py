"""Reads the embeddings of a prompt, and rejects those that do not fit the model."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from nanoserve.engine.prompt_embeds import PromptEmbeds
from nanoserve.engine.text_limit import prompt_too_long
from nanoserve.sampling_params import SamplingParams
from nanoserve.text.embedding_rows import bytes_of, matrix_of
from nanoserve.utils.checks import is_int, require, shown

WHOLE, PIECES = "prompt_embeds", "prompt_embeds_pieces"  # keys of a prompt dictionary
_PLACEHOLDER = 0  # the id at the positions of `prompt_embeds`, as in vLLM's outputs


class PromptEmbedsReader:
    """Reads and checks the embeddings of prompts. dtype, hidden_size: the model's."""

    def __init__(self, dtype: str, hidden_size: int, block_size: int, max_model_len: int) -> None:
        self._dtype, self._hidden_size = dtype, hidden_size
        self._block_size, self._max_model_len = block_size, max_model_len

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
            f"prompt_logprobs={params.prompt_logprobs} needs a prompt of tokens: embeddings "
            "have no probability",
        )
        if pieces is None:
            require(
                rest.get("prompt_token_ids") is None,
                f"{WHOLE!r} is a whole prompt: for embeddings between token ids, pass "
                f"'prompt_token_ids' and {PIECES!r}",
            )
            rows = self._rows(WHOLE, whole, params.max_tokens)
            rest["prompt_token_ids"] = [_PLACEHOLDER] * len(rows)
            return rest, self._joined([(0, rows)])
        require(whole is None, f"pass either {WHOLE!r} or {PIECES!r}")
        token_ids = rest.get("prompt_token_ids")
        require(
            token_ids is not None and hasattr(token_ids, "__len__"),
            f"{PIECES!r} needs 'prompt_token_ids' with an id at each of their positions",
        )
        return rest, self._joined(self._read_pieces(pieces, len(token_ids), params.max_tokens))

    def _read_pieces(
        self, pieces: Any, num_tokens: int, max_tokens: int | None
    ) -> list[tuple[int, np.ndarray]]:
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
            start, rows = int(piece[0]), self._rows(name, piece[1], max_tokens)
            require(
                0 <= start <= num_tokens - len(rows),
                f"{name} has the positions {start} to {start + len(rows) - 1}, but the prompt has "
                f"{num_tokens} token ids, one for each position of a piece",
            )
            read.append((start, rows))
        read.sort(key=lambda piece: piece[0])
        for (start, rows), (after, _) in pairwise(read):
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

    def _rows(self, name: str, tensor: Any, max_tokens: int | None) -> np.ndarray:
        """Return a tensor as rows of bytes, in the model's dtype. They may share its memory."""
        rows = matrix_of(name, tensor, self._hidden_size)
        if len(rows) >= self._max_model_len:  # before anything is copied
            raise prompt_too_long(self._max_model_len, len(rows), max_tokens)
        return bytes_of(name, rows, self._dtype)
