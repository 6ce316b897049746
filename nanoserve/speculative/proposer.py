"""Who guesses: the seam, and the choice by name."""

from typing import Protocol

from nanoserve.engine.sequence import Sequence
from nanoserve.speculative.config import SpeculativeConfig


class Proposer(Protocol):
    """It may guess anything: a wrong guess costs time, and nothing else."""

    def propose(self, seq: Sequence, most: int) -> list[int]:
        """What may come after the tokens of `seq`, which are all known: at most so many guesses.

        Called when a step is planned, so it must be quick.
        """

    def forget(self, seq: Sequence) -> None:
        """It has ended, with the tokens that it has now."""


def make_proposer(config: SpeculativeConfig) -> Proposer:
    if config.method == "suffix":
        from nanoserve.speculative.suffix import SuffixProposer

        return SuffixProposer(config)
    from nanoserve.speculative.ngram import NgramProposer

    return NgramProposer(*config.lookup)
