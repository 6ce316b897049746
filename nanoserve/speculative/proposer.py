"""Who guesses: the seam."""

from itertools import takewhile
from typing import Any, Protocol

from nanoserve.engine.sequence import Sequence


class Proposer(Protocol):
    """It may guess anything: a wrong guess costs time, and nothing else."""

    # Whether a guess costs computing, and a place in the KV cache. Then it is asked for no more
    # guesses than will be verified, and each of them has its place before that.
    is_model: bool
    needs_hidden: bool  # whether it is to `learn`

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence at most so many guesses of what comes after its tokens.

        All of these are known. Called when a step is planned, which waits for it.
        """

    def begin(self, seq: Sequence) -> None:
        """It was admitted, for the first time or again, to blocks that it has now."""

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        """The last token of `seq` came of this row of the target's hidden states."""

    def forget(self, seq: Sequence) -> None:
        """It has ended, with the tokens that it has now."""

    def close(self) -> None: ...


def num_right(guesses: list[int], token_ids: list[int]) -> int:
    """How many of `guesses` came, one after the other from the first on."""
    pairs = zip(guesses, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class TextProposer:
    """One that looks at a sequence's tokens, and at nothing else of it."""

    is_model = needs_hidden = False

    def propose(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.guess(seq, most) for seq, most in asked]

    def guess(self, seq: Sequence, most: int) -> list[int]:
        raise NotImplementedError

    def begin(self, seq: Sequence) -> None:
        pass

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def close(self) -> None:
        pass
