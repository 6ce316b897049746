"""The interfaces between the engine and grammar backends."""

from typing import NamedTuple, Protocol

import numpy as np


class Source(NamedTuple):
    """The source of a grammar. Equal sources are compiled once.

    kind: "json" (a schema), "regex", "choice" (a JSON list), "grammar" or "structural_tag".
    text: the grammar.
    whitespace: a regular expression for the whitespace between the parts of JSON. "" allows only
        the one space after each comma and colon.
    """

    kind: str
    text: str
    whitespace: str = ""


class Grammar(Protocol):
    """The state of one output in a grammar.

    A grammar describes text, so it never allows special tokens, not even EOS. `may_end` says
    whether the output may end here.
    """

    def fill(self, mask: np.ndarray) -> None:
        """Set bit t % 32 of word t // 32 for each token t that may come next; clear all others.

        mask: int32 [ceil(num_tokens / 32)]. Raises `ValueError` if the mask takes too much
        computation.
        """

    def advance(self, token_id: int) -> bool:
        """Accept a token if the grammar allows it, and return True if it does."""

    def accept(self, token_ids: list[int]) -> None:
        """Accept these tokens. Raises `ValueError` if the grammar does not allow one of them."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""

    def forced(self, most: int) -> list[int]:
        """Return up to `most` tokens that must come next (*jump-forward* tokens)."""

    @property
    def may_end(self) -> bool:
        """True if the output matches the grammar as it is."""

    @property
    def is_terminated(self) -> bool:
        """True if no further token is allowed."""


class CompiledGrammar(Protocol):
    """A grammar compiled for a tokenizer, shared by all outputs that use it."""

    num_bytes: int  # approximate size in memory

    def start(self) -> Grammar:
        """Return the state of an empty output."""


class Backend(Protocol):
    """A library that compiles grammars, created for a tokenizer as `Class(tokenizer, vocab_size)`.

    check_seconds: CPU time that `check` may take; a grammar that takes longer is rejected.
    """

    check_seconds: int

    def compile(self, source: Source) -> CompiledGrammar:
        """Return a compiled grammar. Raises `ValueError` that names a part not supported."""

    @staticmethod
    def check(source: Source) -> None:
        """Raise `ValueError` for a grammar that cannot be compiled.

        Called without a tokenizer, in a child process that the grammar may crash.
        """


def count_legal(grammar: Grammar, token_ids: list[int]) -> int:
    """Return how many of these tokens, from the first on, the grammar allows in sequence."""
    num_legal = 0
    while num_legal < len(token_ids) and grammar.advance(token_ids[num_legal]):
        num_legal += 1
    grammar.rollback(num_legal)
    return num_legal
