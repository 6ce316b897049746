"""What proposes draft tokens: the seam."""

from collections.abc import Callable
from itertools import takewhile
from typing import Any, Protocol

from nanoserve.engine.executor import Executor
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence


class Proposer(Protocol):
    """Proposes any tokens: a rejected one costs time, and nothing else.

    is_model: True if a draft token costs computing, and a place in the KV cache. Then no more of
        them are requested than will be verified, and each has its place before that.
    needs_hidden: True if `learn` is to be called.
    """

    is_model: bool
    needs_hidden: bool

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return for each sequence at most so many draft tokens, to come after its tokens.

        All of its tokens are known. Called when a step is planned, which waits for it.
        """

    def begin(self, seq: Sequence) -> None:
        """Called when a sequence is admitted, for the first time or again: it has new blocks."""

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        """Called when the last token of `seq` was sampled from this row of the hidden states."""

    def forget(self, seq: Sequence) -> None:
        """Called when a sequence has ended, with the tokens that it has now."""

    def close(self) -> None: ...


# Makes a proposer, with the executor and the scheduler that it is for.
MakeProposer = Callable[[Executor, Scheduler], Proposer]


def count_accepted(draft_tokens: list[int], token_ids: list[int]) -> int:
    """Return how many draft tokens are the same as `token_ids`, from the first one on."""
    pairs = zip(draft_tokens, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class TextProposer:
    """Base of proposers that look at a sequence's tokens, and at nothing else of it."""

    is_model = needs_hidden = False

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.draft(seq, most) for seq, most in wanted]

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """Return at most so many tokens that may come after those of `seq`."""
        raise NotImplementedError

    def begin(self, seq: Sequence) -> None:
        pass

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def close(self) -> None:
        pass
