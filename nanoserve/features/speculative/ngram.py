"""Prompt lookup (Saxena 2023): what followed these tokens the last time may follow them again.

It pays where output repeats input: summaries, corrections, code that is changed, records that are
copied. A sequence has a table for each length of n-gram: where its latest occurrence ends. A token
enters each table once, so a draft costs a few lookups, however long the text is.
"""

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.sequence import Sequence
from nanoserve.features.speculative.proposer import MakeProposer, TextProposer


def prepare_ngram(config: EngineConfig, model_config: ModelConfig) -> MakeProposer:
    """Return what makes the proposer of method "ngram"."""
    lookup = config.speculative_config.lookup
    return lambda executor, scheduler: NgramProposer(*lookup)


class NgramProposer(TextProposer):
    """Looks for the last `longest` tokens first, then for fewer, down to `shortest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._indexes: dict[Sequence, NgramIndex] = {}

    def draft(self, seq: Sequence, most: int) -> list[int]:
        index = self._indexes.get(seq)
        # After an exception a sequence may have fewer tokens than before.
        if index is None or index.num_tokens > len(seq.token_ids):
            index = self._indexes[seq] = NgramIndex(self._lengths)
        start = index.find(seq.token_ids)
        return continued(seq.token_ids, start, most) if start else []

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)


def continued(token_ids: list[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start` on, as if the text went on as it did there.

    [1, 2, 1, 2] from 2 on, with count 5: [1, 2, 1, 2, 1].
    """
    drafts = token_ids[start : start + count]
    period = len(drafts)  # from here on, draft tokens are copied
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return drafts


class NgramIndex:
    """An index of one text that grows: where each n-gram occurred last, but for those at its end.

    Where no short n-gram has occurred, no longer one has: so most texts need only one table.
    """

    def __init__(self, lengths: range) -> None:
        """lengths: the longest first."""
        self._tables = [NgramTable(n) for n in reversed(lengths)]
        self.num_tokens = 0

    def find(self, token_ids: list[int]) -> int:
        """Return where the latest earlier occurrence of the longest last n-gram ends, or 0."""
        self.num_tokens = len(token_ids)
        found = 0
        for table in self._tables:
            end = table.find(token_ids)
            if not end:
                break
            found = end
        return found


class NgramTable:
    """A table of n-grams of one length: where each of them ends."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._ends: dict[tuple[int, ...], int] = {}
        self._first = length  # the first end that is new

    def find(self, token_ids: list[int]) -> int:
        """Return where the last tokens have occurred before, or 0."""
        # All n-grams that end before the last token: behind them a token is known.
        first, n = self._first, self._length
        self._first = max(first, len(token_ids))
        tails = (token_ids[first - n + i :] for i in range(n))
        ends = range(first, len(token_ids))
        self._ends.update(zip(zip(*tails, strict=False), ends, strict=False))
        return self._ends.get(tuple(token_ids[-n:]), 0)
