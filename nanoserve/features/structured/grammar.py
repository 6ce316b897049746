"""What may come next: the seam between the engine and whoever knows grammars."""

from typing import Protocol

import numpy as np

from nanoserve.features.structured.source import Source


class Grammar(Protocol):
    """A grammar, and how far an output has come in it.

    Texts are what grammars are made of; special tokens belong to none. That an output may end is
    told by `may_end`, whatever ids the model ends with.
    """

    def fill(self, mask: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 for each token t that may come, and clear all others.

        mask: int32 [ceil(num_tokens / 32)]. Raises `ValueError` if that is too much to compute.
        """

    def advance(self, token_id: int) -> bool:
        """Take it, if it may come."""

    def accept(self, token_ids: list[int]) -> None:
        """They have come. Raises `ValueError` if one of them must not."""

    def rollback(self, num_tokens: int) -> None:
        """The last so many have not come."""

    def forced(self, most: int) -> list[int]:
        """Up to so many tokens that come next, whatever a model would rather say."""

    @property
    def may_end(self) -> bool:
        """Whether what has come is all that the grammar asks for."""

    @property
    def is_terminated(self) -> bool:
        """Whether nothing more can come."""


class CompiledGrammar(Protocol):
    """What all outputs under one grammar share."""

    num_bytes: int  # of memory, about

    def start(self) -> Grammar:
        """For an output that has not begun."""


class Backend(Protocol):
    """What compiles grammars for a tokenizer; made as `BackendClass(tokenizer, vocab_size)`.

    check_seconds: of computing that `check` may take; what takes longer is refused.
    """

    check_seconds: int

    def compile(self, source: Source) -> CompiledGrammar:
        """Raises `ValueError` that names what is wrong, or not supported."""

    @staticmethod
    def check(source: Source) -> None:
        """Raise `ValueError` for what cannot be compiled. Called in a process of its own, which
        may die of it, and without a tokenizer."""


def count_legal(grammar: Grammar, token_ids: list[int]) -> int:
    """How many of these may come, one behind the other, from the first on."""
    num_legal = 0
    while num_legal < len(token_ids) and grammar.advance(token_ids[num_legal]):
        num_legal += 1
    grammar.rollback(num_legal)
    return num_legal
