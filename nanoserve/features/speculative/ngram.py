"""Prompt lookup (Saxena 2023) drafts the tokens that followed an n-gram before.

It pays where output repeats input, as in summaries, corrections, edited code or copied records. For
each n-gram length, a sequence has a table of the positions at which each n-gram last ended. A token
is entered once into each table, so a draft costs a few lookups, however long the sequence is.
"""

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.proposer import PreparedProposer, TextProposer


def prepare_ngram(config: EngineConfig, model_config: ModelConfig) -> PreparedProposer:
    """Return the proposer of method "ngram"."""
    lookup = config.speculative_config.lookup
    return PreparedProposer(lambda executor, scheduler: NgramProposer(*lookup))


class NgramProposer(TextProposer):
    """Proposes the tokens after the latest earlier occurrence of the longest matching n-gram.

    n-grams have `shortest` to `longest` tokens.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._indexes: dict[Sequence, NgramIndex] = {}

    def draft(self, seq: Sequence, most: int) -> list[int]:
        index = self._indexes.get(seq)
        # After an exception a sequence may have fewer tokens than before.
        if index is None or index.num_tokens > len(seq.token_ids):
            index = self._indexes[seq] = NgramIndex(self._lengths)
        start = index.find(seq.token_ids)
        if start and seq.prompt_embeds is not None:  # no draft token is a placeholder
            end = seq.prompt_embeds.next_position(start)
            most = most if end is None else min(most, end - start)
        return continued(seq.token_ids, start, most) if start else []

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)


def continued(token_ids: list[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from position `start` on. Past the end, the tokens are repeated.

    [1, 2, 1, 2] from 2 on, with count 5: [1, 2, 1, 2, 1].
    """
    drafts = token_ids[start : start + count]
    period = len(drafts)  # further tokens are copies of draft tokens
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts


class NgramIndex:
    """An index of the last occurrence of each n-gram in a growing sequence, except at its end.

    If a short n-gram has not occurred before, no longer n-gram has, so most lookups read one table.
    """

    def __init__(self, lengths: range) -> None:
        """Create an empty index of n-grams of these `lengths`, the longest first."""
        self._tables = [NgramTable(n) for n in reversed(lengths)]
        self.num_tokens = 0

    def find(self, token_ids: list[int]) -> int:
        """Return the end of the latest earlier occurrence of the longest final n-gram, or 0."""
        self.num_tokens = len(token_ids)
        found = 0
        for table in self._tables:
            end = table.find(token_ids)
            if not end:
                break
            found = end
        return found


class NgramTable:
    """A table of the n-grams of one length, with the position at which each last ended."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._ends: dict[tuple[int, ...], int] = {}
        self._first = length  # the first end that is new

    def find(self, token_ids: list[int]) -> int:
        """Return the end of the latest earlier occurrence of the last n tokens, or 0."""
        # Add the new n-grams that end before the last token: the token after each is known.
        first, n = self._first, self._length
        self._first = max(first, len(token_ids))
        tails = (token_ids[first - n + i :] for i in range(n))
        ends = range(first, len(token_ids))
        self._ends.update(zip(zip(*tails, strict=False), ends, strict=False))
        return self._ends.get(tuple(token_ids[-n:]), 0)
