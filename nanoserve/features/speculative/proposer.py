"""The interface of proposers, which propose draft tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

from nanoserve.checkpoint.model_config import ModelConfig
from nanoserve.config import EngineConfig
from nanoserve.engine.executor import Executor, SecondModelMemory
from nanoserve.engine.scheduler import Scheduler
from nanoserve.engine.sequence import Sequence


class Proposer(Protocol):
    """Proposes draft tokens. A wrong draft token costs time, but never changes the output.

    is_model: True if a model computes the draft tokens and may keep their K and V. Then only as
        many are requested as will be verified, and KV slots are reserved for them first.
    needs_hidden: True if `learn` is to be called with hidden states.
    """

    is_model: bool
    needs_hidden: bool

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return draft tokens that may follow each sequence.

        wanted: sequences, each with the most draft tokens that it may have. None of them has a
        pending token. The scheduler waits for this call while it plans a step.
        """

    def begin(self, seq: Sequence) -> None:
        """Note that `seq` was admitted with new blocks, for the first time or after preemption."""

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        """Note that the last token of `seq` was sampled from row `row` of the hidden states."""

    def forget(self, seq: Sequence) -> None:
        """Note that `seq` has ended. Its tokens can still be read."""

    def close(self) -> None: ...


# Makes the proposer of an engine, from its executor and its scheduler.
MakeProposer = Callable[[Executor, Scheduler], Proposer]


@dataclass(frozen=True)
class PreparedProposer:
    """A proposer that has been checked for a model, whose weights are not read yet.

    second_model_memory: see `nanoserve.engine.extension.PreparedFeature`.
    """

    make: MakeProposer
    second_model_memory: Callable[[], SecondModelMemory] | None = None


# Raises `ValueError` if a method does not support this model, before any weight is read.
PrepareProposer = Callable[[EngineConfig, ModelConfig], PreparedProposer]


def count_accepted(draft_tokens: list[int], token_ids: list[int]) -> int:
    """Return how many draft tokens agree with `token_ids`, up to the first mismatch."""
    pairs = zip(draft_tokens, token_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class TextProposer:
    """Base class of proposers that read only the tokens of a sequence."""

    is_model = needs_hidden = False

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.draft(seq, most) for seq, most in wanted]

    def draft(self, seq: Sequence, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the tokens of `seq`."""
        raise NotImplementedError

    def begin(self, seq: Sequence) -> None:
        pass

    def learn(self, seq: Sequence, hidden: Any, row: int) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass

    def close(self) -> None:
        pass
