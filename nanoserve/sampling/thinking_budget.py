"""A logits processor that ends the reasoning of a request after a number of tokens."""

from collections.abc import Sequence
from typing import Any

_OTHER = b"\0"  # stands for a token that has no part in a tag


class ThinkingBudget:
    """Forces the tokens of the closing tag once the reasoning has `num_tokens` tokens.

    It has no state: what it does follows from the tokens of the output, so recomputation, several
    completions and async scheduling need nothing of it. Before the budget is used up, and after the
    tag, logits stay as they are.

    opens, closes: the tags as bytes; a tag may be several tokens, in any split. pieces: the bytes
    of all tokens that may be a part of a tag, or whitespace before it. forced: the token ids of the
    closing tag. is_open: True if the prompt has opened the reasoning; otherwise an output that
    begins with an opening tag does.
    """

    def __init__(
        self,
        num_tokens: int,
        opens: Sequence[bytes],
        closes: Sequence[bytes],
        pieces: dict[int, bytes],
        forced: Sequence[int],
        is_open: bool,
    ) -> None:
        self._num_tokens, self._pieces, self._is_open = num_tokens, pieces, is_open
        self._opens, self._closes, self._forced = tuple(opens), tuple(closes), list(forced)

    def __call__(self, output_token_ids: list[int], logits: Any) -> Any:
        """Return the logits [vocab_size] of a row, with only one token left if it is forced."""
        token_id = self.forced_token(output_token_ids)
        if token_id is None:
            return logits
        only = logits.new_full(logits.shape, float("-inf"))
        only[token_id] = 0.0
        return only

    def forced_token(self, output_token_ids: Sequence[int]) -> int | None:
        """Return the token that has to come next; None if any may."""
        num_tokens = len(output_token_ids)
        if num_tokens < self._num_tokens:
            return None
        start = 0 if self._is_open else self._start_in(output_token_ids)
        if start is None:
            return None
        end = start + self._num_tokens
        index = num_tokens - end
        if not 0 <= index < len(self._forced):
            return None
        thought = list(output_token_ids[start:end])
        text = self._bytes_of(thought)
        if any(tag in text for tag in self._closes):
            return None
        index += self._num_begun(thought)
        return self._forced[index] if index < len(self._forced) else None

    def _start_in(self, output_token_ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to the end of the opening tag; None if there is none."""
        text = b""
        for number, token_id in enumerate(output_token_ids):
            text = (text + self._pieces.get(token_id, _OTHER)).lstrip()
            if text.startswith(self._opens):
                return number + 1
            if not any(tag.startswith(text) for tag in self._opens):
                return None
        return None

    def _num_begun(self, thought: list[int]) -> int:
        """Return how many tokens of the closing tag the model has begun to write by itself."""
        for length in range(min(len(self._forced) - 1, len(thought)), 0, -1):
            if thought[-length:] == self._forced[:length]:
                return length
        return 0

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self._pieces.get(token_id, _OTHER) for token_id in token_ids])
